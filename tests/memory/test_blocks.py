"""Blocks of host memory that are used again: the smallest that fits, and no more in all than was in use at once."""

from __future__ import annotations

import random

from tables import each

from zerokern.memory.blocks import Block, Blocks

KIB = 1024


def sizes(blocks: Blocks) -> list[int]:
    return sorted(one.memory.numel() // KIB for one in blocks._free)


def test_the_smallest_that_fits_is_taken() -> None:
    blocks = Blocks("a test")
    taken = [blocks.take(size * KIB) for size in (64, 16, 32)]
    for one in taken:
        blocks.give(one)
    assert blocks.take(20 * KIB) is taken[2] and blocks.take(16 * KIB) is taken[1]
    assert blocks.take(40 * KIB) is taken[0] and blocks.nbytes == 112 * KIB


def test_the_smallest_make_way_for_a_larger_one() -> None:
    blocks = Blocks("a test")
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
    draw, blocks, taken, most = random.Random(seed), Blocks("a test"), [], 0
    for _ in range(200):
        if taken and draw.random() < 0.5:
            blocks.give(taken.pop(draw.randrange(len(taken))))
            continue
        nbytes = draw.choice((8, 9, 24, 64)) * KIB
        one = blocks.take(nbytes)
        assert isinstance(one, Block) and one.memory.numel() >= nbytes and all(one is not other for other in taken)
        taken.append(one)
        most = max(most, sum(other.memory.numel() for other in taken))
        assert blocks.nbytes <= most
