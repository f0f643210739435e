"""The providers of `zerokern bench cast` under pytest-benchmark."""

from __future__ import annotations

OP = "cast"


def test_cast(benchmark, ready) -> None:
    benchmark(ready.run)
