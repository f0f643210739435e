"""The providers of `zerokern bench lion` under pytest-benchmark."""

from __future__ import annotations

OP = "lion"


def test_lion(benchmark, ready) -> None:
    benchmark(ready.run)
