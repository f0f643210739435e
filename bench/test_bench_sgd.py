"""The providers of `zerokern bench sgd` under pytest-benchmark."""

from __future__ import annotations

OP = "sgd"


def test_sgd(benchmark, ready) -> None:
    benchmark(ready.run)
