"""The providers of `zerokern bench adam` under pytest-benchmark."""

from __future__ import annotations

OP = "adam"


def test_adam(benchmark, ready) -> None:
    benchmark(ready.run)
