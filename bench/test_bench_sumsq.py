"""The providers of `zerokern bench sumsq` under pytest-benchmark."""

from __future__ import annotations

OP = "sumsq"


def test_sumsq(benchmark, ready) -> None:
    benchmark(ready.run)
