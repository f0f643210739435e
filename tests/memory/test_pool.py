"""What stays in host memory for many steps comes on huge pages, where the system has any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zerokern.memory.arena import HUGE_PAGE
from zerokern.memory.place import DevicePool


def asked_for(address: int) -> bool:
    """Whether the mapping at an address may have huge pages, by what the kernel says of it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("kind", ["zeros", "empty"])
def test_large_tensors_ask_for_huge_pages(kind: str) -> None:
    pool = DevicePool(torch.device("cpu"))
    made = getattr(pool, kind)(16 * HUGE_PAGE, torch.uint8)
    assert asked_for(made.data_ptr() + made.nbytes // 2)
    assert made.untyped_storage().nbytes() == made.nbytes
    made.untyped_storage().resize_(0)  # it stays torch's own, which zk.shard relies on


def test_small_ones_are_torchs() -> None:
    pool = DevicePool(torch.device("cpu"))
    assert pool.zeros(0, torch.float32).numel() == 0
    assert pool.zeros(1000, torch.bfloat16).count_nonzero() == 0
