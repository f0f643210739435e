"""The benchmarks: one file per op. Each says what it updates, what its truth is and who does the same.

KERNELS work on memory, in contests that `bench.measure` runs; the others bring a measurement of their own, and those
of "zero" and "offload" are packages, `bench.zero` and `bench.offload`.
"""

from __future__ import annotations

KERNELS = ("adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate", "stream")
NAMES = (*KERNELS, "io", "save", "zero", "offload")
