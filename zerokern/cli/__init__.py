"""The `zerokern` command; its benchmarks lie in bench/ and its demo in examples/."""
