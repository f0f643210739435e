"""A test that takes `engine` runs on both engines, quickly on one; what this machine lacks is a skip that says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from children import Nursery
from io_cases import EngineCase, slow_but

from zerokern.io import why_no_uring
from zerokern.memory import Arena


@pytest.fixture(params=slow_but("threads" if why_no_uring() else "uring", among=("uring", "threads")))
def engine(request: pytest.FixtureRequest) -> EngineCase:
    """One of the engines: `engine.open(folder)` makes a store on it, and asserts that it is the one that runs."""
    case: EngineCase = request.param
    if case.requirement():
        pytest.skip(case.requirement())
    return case


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 << 20, poison=True)
    yield arena
    arena.close(force=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that no store has been in."""
    return tmp_path / "store"


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts children that have everything imported."""
    nursery = Nursery(tmp_path_factory.mktemp("children"))
    yield nursery
    nursery.close()
