"""The benchmarks: one file per op. Each says what it updates, what its truth is and who does the same."""

from __future__ import annotations

NAMES = ("adam", "lion", "adagrad", "sgd", "sumsq", "cast", "accumulate", "stream")
