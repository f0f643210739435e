"""Random lists for the kernels of `cuda/`: sizes around everything that they cut at, and any alignment."""

from __future__ import annotations

import random

import torch
from coroutine_machine import STAGE, Machine
from torch import Tensor

from zerokern.kernels.cuda import spans

FILL = 0x77


def sizes_of(choose: random.Random, most: int) -> list[int]:
    """A few spans, or many small ones."""
    count = choose.choice((1, 2, 5, 40))
    around = (0, 1, 15, 16, 17, STAGE - 1, STAGE, 4 * STAGE + 16, STAGE, STAGE + 1)
    small = [choose.randrange(40) for _ in range(count)]
    if count == 40:
        return small
    return [choose.choice((*around, choose.randrange(200), choose.randrange(most), one)) for one in small]


def room(nbytes: int) -> Tensor:
    """Memory that begins at a multiple of 16 bytes, full of one byte."""
    raw = torch.full((nbytes + 32,), FILL, dtype=torch.uint8)
    begin = -raw.data_ptr() % 16
    return raw[begin : begin + nbytes]


def placed_spans(choose: random.Random, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Where each span begins on two sides: in order, with gaps; mostly aligned alike, some aligned to 16 bytes."""
    places: tuple[list[int], list[int]] = ([], [])
    ends = [0, 0]
    for size in sizes:
        begins = [end + choose.choice((0, choose.randrange(24))) for end in ends]
        if choose.random() < 0.7:
            begins[1] += (begins[0] - begins[1]) % choose.choice((2, 4, 8, 16, 16))
        for side in (0, 1):
            places[side].append(begins[side])
            ends[side] = begins[side] + size
    return places


def ferry_once(machine: Machine, number: int) -> None:
    """One random list; the bytes, and those that are not its business."""
    choose = random.Random(number)
    sizes = sizes_of(choose, 12 * STAGE)
    to, begin = placed_spans(choose, sizes)
    target = room(to[-1] + sizes[-1] + 40)
    source = torch.randint(0, 256, (begin[-1] + sizes[-1] + 40,), dtype=torch.uint8)
    source = source[-source.data_ptr() % 16 :]
    expected = target.clone()
    pairs = []
    for t, b, size in zip(to, begin, sizes, strict=True):
        expected[t : t + size] = source[b : b + size]
        pairs.append((target[t : t + size], source[b : b + size]))
    machine.seed = 1000 * number
    spans.ferry(pairs, None, choose.choice((1, 1, 2, 3, 8)))  # few, so that a ring goes around
    assert torch.equal(target, expected)


KERNELS = {"ferry": ferry_once}
