"""The tests of memory/ share their helpers as modules, and devices that are played."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.with_name("zero")))
sys.path.insert(0, str(Path(__file__).parent))

from copy_cases import ThreadDriver

STREAMS = ("", "compute", "out", "in")


@pytest.fixture(params=STREAMS, ids=lambda slow: f"slow {slow or 'none'}")
def driver(request: pytest.FixtureRequest) -> Iterator[ThreadDriver]:
    driver = ThreadDriver(request.param)
    yield driver
    driver.end()


@pytest.fixture
def quick() -> Iterator[ThreadDriver]:
    driver = ThreadDriver()
    yield driver
    driver.end()
