"""Fixtures where bits are compared between ranks: as many threads for everybody, and quick searches for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

__all__ = ["imported_and_done_with", "one_thread"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the machine; and sums of the same order have the same bits only with the same threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def imported_and_done_with() -> None:
    """What is imported while tests run (torch._dynamo) stays: else each search for garbage looks at all of it."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()
