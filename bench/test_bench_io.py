"""Our passes of `zerokern bench io` under pytest-benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import zerokern as zk

from .disk.contest import Mover, Task
from .disk.pattern import Pattern, patterns
from .disk.workfile import Workfile
from .ops import io


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workfile]:
    folder: Path = tmp_path_factory.mktemp("io")
    with Workfile(folder, max(pattern.nbytes for pattern in patterns(smoke=True))) as made:
        yield made


@pytest.fixture(params=patterns(smoke=True), ids=lambda pattern: pattern.name)
def movers(request: pytest.FixtureRequest, file: Workfile) -> Iterator[list[Mover]]:
    pattern: Pattern = request.param
    task = Task(pattern, file, pattern.nbytes, tune=False, say=lambda text: None)
    with io.ours(task, zk.io.probe(file.folder)) as found:
        yield found


def test_io(benchmark, movers: list[Mover]) -> None:
    for mover in movers:
        mover.check()
    benchmark(movers[0].run)
