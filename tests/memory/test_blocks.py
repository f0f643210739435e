"""Blocks of host memory that are used again: the smallest that fits, and no more in all than was in use at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from copy_cases import ThreadDriver
from tables import each

from zerokern.memory import Copies, Wanted
from zerokern.memory.blocks import BlockPool, BlockTier, HostBlock
from zerokern.memory.staging import DoneTicket

KIB = 1024


def sizes(blocks: BlockPool) -> list[int]:
    return sorted(one.memory.numel() // KIB for one in blocks._free)


def test_the_smallest_that_fits_is_taken() -> None:
    blocks = BlockPool("a test")
    taken = [blocks.take(size * KIB) for size in (64, 16, 32)]
    for one in taken:
        blocks.give(one)
    assert blocks.take(20 * KIB) is taken[2] and blocks.take(16 * KIB) is taken[1]
    assert blocks.take(40 * KIB) is taken[0] and blocks.nbytes == 112 * KIB


def test_the_smallest_make_way_for_a_larger_one() -> None:
    blocks = BlockPool("a test")
    for one in [blocks.take(size * KIB) for size in (16, 32, 64)]:
        blocks.give(one)
    large = blocks.take(80 * KIB)
    assert blocks.nbytes == 80 * KIB and sizes(blocks) == []
    blocks.give(large)
    assert blocks.take(10 * KIB) is not large, "there is room for one of its size beside it"
    assert blocks.nbytes == 90 * KIB
    assert blocks.take(12 * KIB).memory.numel() == 12 * KIB and blocks.nbytes == 102 * KIB
    assert blocks.take(11 * KIB) is large, "one that is far too large serves where there is no more"


@each("seed", range(20))
def test_never_more_than_was_in_use_at_once(seed: int) -> None:
    draw, blocks, taken, most = random.Random(seed), BlockPool("a test"), [], 0
    for _ in range(200):
        if taken and draw.random() < 0.5:
            blocks.give(taken.pop(draw.randrange(len(taken))))
            continue
        nbytes = draw.choice((8, 9, 24, 64)) * KIB
        one = blocks.take(nbytes)
        assert isinstance(one, HostBlock) and one.memory.numel() >= nbytes and all(one is not other for other in taken)
        taken.append(one)
        most = max(most, sum(other.memory.numel() for other in taken))
        assert blocks.nbytes <= most


class Behind:
    """A tier behind blocks, at once; it looks at what may still be copied from the memory that it is given."""

    def __init__(self) -> None:
        self.bytes: dict[int, torch.Tensor] = {}
        self.may_write: Callable[[torch.Tensor], bool] = lambda memory: True

    def lay_out(self, wanted: Sequence[Wanted]) -> list[int]:
        return [len(self.bytes) + number for number in range(len(wanted))]

    def store(self, part: int, value: torch.Tensor, after: Any = None) -> Any:
        self.bytes[part] = value.clone()
        return DoneTicket()

    def fetch(self, part: int, out: torch.Tensor, after: Any = None) -> Any:
        assert self.may_write(out), "a copy to the device still reads this block"
        out.copy_(self.bytes[part])
        return DoneTicket()

    def evict(self, parts: Iterable[int]) -> None:
        for part in parts:
            del self.bytes[part]

    def held(self) -> dict[str, int]:
        return {"inputs": sum(one.numel() for one in self.bytes.values())}


def test_a_block_is_not_read_into_while_it_is_copied_from() -> None:
    driver, behind = ThreadDriver("in", delay=0.05), Behind()
    blocks = BlockPool("a test")
    tier = BlockTier(blocks, Copies(driver), behind)
    values = [torch.full((8 * KIB,), number, dtype=torch.uint8) for number in (1, 2)]
    parts = tier.lay_out([Wanted("inputs", values[0].shape, torch.uint8)] * 2)
    for part, value in zip(parts, values, strict=True):
        tier.store(part, value).wait()
    assert blocks.nbytes == 8 * KIB and tier.held() == {"inputs": 16 * KIB}
    copied: list[Any] = []
    behind.may_write = lambda memory: all(one.done() for one in copied)
    found = [torch.zeros_like(value) for value in values]
    for part, out in zip(parts, found, strict=True):
        ticket = tier.fetch(part, out)
        ticket.gate()
        copied.append(ticket)
    for ticket in copied:
        ticket.wait()
    assert all(map(torch.equal, found, values)) and blocks.nbytes == 8 * KIB
    tier.evict(parts)
    assert not any(tier.held().values())
    driver.end()
