"""The providers of `zerokern bench adagrad` under pytest-benchmark."""

from __future__ import annotations

OP = "adagrad"


def test_adagrad(benchmark, ready) -> None:
    benchmark(ready.run)
