"""The providers of `zerokern bench stream` under pytest-benchmark."""

from __future__ import annotations

OP = "stream"


def test_stream(benchmark, ready) -> None:
    benchmark(ready.run)
