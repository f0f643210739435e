"""What the checkpoint tests share: modules beside this file, worlds of ranks, and the engines that move bytes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent / "zero", HERE.parent / "interop", HERE):
    sys.path.insert(0, str(folder))


@pytest.fixture
def nothing_left_open() -> Iterator[None]:
    """The test leaves no open file that it did not find: what others left may be collected meanwhile."""
    before = Counter(open_files())
    yield
    assert not Counter(open_files()) - before


def open_files() -> list[str]:
    """Where the descriptors of this process lead, but for those that torch and Python keep."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # of the listing itself
            continue
        if ".distcp" in target or "io_uring" in target:
            found.append(target)
    return sorted(found)
