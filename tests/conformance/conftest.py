"""What the conformance suite shares with the sharding tests: folders to import from, and one thread for each rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zero")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the machine; and sums of the same order have the same bits only with the same threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
