"""What `bench/gpu.sh` runs: builds, tests and measures on one GPU, within ten minutes and into a handful of files.

`runner.py` starts each section in a process of its own, `sections/` holds what they measure, `asked.py` what is asked
of the results. A rehearsal runs all of it on a CPU at toy sizes and keeps no time.
"""
