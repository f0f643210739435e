"""`zerokern bench right`: small programs through every library, each held against plain torch with averaged gradients.

`programs/` holds the programs, `libraries/` one adapter for each library, `training.py` what a program asks of them and
the reference; `worker.py` runs cells in processes of their own, `judge.py` says what came of one.
"""
