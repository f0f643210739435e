"""The providers of `zerokern bench OP` under pytest-benchmark, for each op: `pytest bench -k adam` takes one."""

from __future__ import annotations


def test_op(benchmark, ready) -> None:
    benchmark(ready.run)
