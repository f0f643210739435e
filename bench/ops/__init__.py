"""The benchmarks: one file per op. Each says what it updates, what its truth is and who does the same.

KERNELS work on memory, in contests that `bench.measure` runs; the others bring a measurement of their own, and those
of "zero", "offload" and "infinity" are packages, `bench.zero`, `bench.offload` and `bench.infinity`.
"""

from __future__ import annotations

KERNELS = ("adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate", "stream")
NAMES = (*KERNELS, "io", "save", "zero", "offload", "infinity")
