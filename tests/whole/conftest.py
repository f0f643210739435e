"""What whole programs are made of is beside this file, and beside the tests of optimizers and of sharding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "whole"), str(TESTS / "optim"), str(TESTS / "zero"), str(TESTS / "comm")]

from programs import small_rings  # noqa: E402


@pytest.fixture(autouse=True)
def rings_of_a_few_records() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_rings(patch)
        yield
