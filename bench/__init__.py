"""The benchmark suite behind `zerokern bench`: our kernels against everyone else's, on the same buffers, in turns.

README.md beside this file is the protocol; peers/ holds the competitors' wiring.
"""
