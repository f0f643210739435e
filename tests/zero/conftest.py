"""What the sharding tests share: `worlds`, `zero_cases` and `module_cases` beside this file."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


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
