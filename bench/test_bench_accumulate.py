"""The providers of `zerokern bench accumulate` under pytest-benchmark."""

from __future__ import annotations

OP = "accumulate"


def test_accumulate(benchmark, ready) -> None:
    benchmark(ready.run)
