"""How each competitor does the work on a GPU: one file per competitor, open to review. Those of `bench/peers/` whose
wiring is the same on any device are used from there."""
