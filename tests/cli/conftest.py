"""A file that the disk benchmark's tests measure, one for each of their modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from disk_cases import MIB, workfile

    with workfile.Workfile(tmp_path_factory.mktemp("disk"), 64 * MIB) as made:
        yield made
