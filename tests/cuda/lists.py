"""Random lists for the kernels of `cuda/`: sizes around everything that they cut at, and any alignment."""

from __future__ import annotations

import random

import torch
from coroutine_machine import STAGE, Machine
from kernel_cases import same_bits, spread_values
from torch import Tensor

from zerokern.kernels import flat, reference_device
from zerokern.kernels.cuda import bucket, spans

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FILL = 0x77


def sizes_of(choose: random.Random, most: int) -> list[int]:
    """A few spans, or many small ones."""
    count = choose.choice((1, 2, 5, 40))
    around = (0, 1, 15, 16, 17, STAGE - 1, STAGE, 4 * STAGE + 16, STAGE, STAGE + 1)
    small = [choose.randrange(40) for _ in range(count)]
    if count == 40:
        return small
    return [choose.choice((*around, choose.randrange(200), choose.randrange(most), one)) for one in small]


def room(numel: int, dtype: torch.dtype, fill: bool) -> Tensor:
    """Memory that begins at a multiple of 16 bytes: full of one byte, or of values of any exponent, or of values of one
    magnitude, so that every addition rounds."""
    raw = torch.full((numel * dtype.itemsize + 32,), FILL, dtype=torch.uint8)
    begin = -raw.data_ptr() % 16
    whole = raw[begin : begin + numel * dtype.itemsize].view(dtype)
    generator = torch.Generator().manual_seed(numel)
    make = spread_values if numel % 4 == 0 else lambda numel, generator: torch.randn(numel, generator=generator)
    return whole if fill else whole.copy_(make(numel, generator).to(dtype))


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
    target = room(to[-1] + sizes[-1] + 40, torch.uint8, True)
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


def flatten_once(machine: Machine, number: int) -> None:
    """One random list of contiguous tensors, into a bucket or out of it, with or without sums."""
    choose = random.Random(number)
    kinds = choose.sample(DTYPES, choose.choice((1, 1, 2)))
    target_dtype = choose.choice(DTYPES)
    sizes = sizes_of(choose, 9000)
    kind = [choose.choice(kinds) for _ in sizes]
    memory = room(sum(sizes) + 24 * len(sizes), torch.float32, False)
    tensors, end = [], 0
    for size, dtype in zip(sizes, kind, strict=True):
        end += choose.choice((0, 4, choose.randrange(8)))
        tensors.append(
            memory[end : end + size].to(dtype).clone() if dtype != torch.float32 else memory[end : end + size]
        )
        end += size
    offsets, at = [], choose.choice((0, 0, 1, 3))
    for size in sizes:
        at += choose.choice((0, 0, choose.randrange(9)))
        offsets.append(at)
        at += size
    whole = room(at + 8, target_dtype, False)
    into, scale = choose.random() < 0.6, choose.choice((1.0, 0.3, -2.0))
    factor = torch.tensor([scale]) if choose.random() < 0.3 else scale
    stats = torch.full((2,), 77.0, dtype=torch.float64) if choose.random() < 0.6 else None
    run = flat.flatten if into else flat.unflatten
    machine.seed = 1000 * number
    results = []
    for impl in ("cuda", "reference"):
        own, bucket_own = [one.clone() for one in tensors], whole.clone()
        shifted = [room(one.numel() + 1, one.dtype, False)[number % 2 :][: one.numel()].copy_(one) for one in own]
        lists = (shifted, bucket_own) if into else (bucket_own, shifted)
        run(
            *lists,
            offsets=offsets,
            scale=factor if impl == "cuda" else scale,
            stats=stats if impl == "cuda" else None,
            impl=impl,
        )
        results.append((shifted, bucket_own))
    (moved, filled), (wanted, expected) = results
    assert same_bits(filled, expected) and all(same_bits(a, b) for a, b in zip(moved, wanted, strict=True))
    if stats is not None:
        written = [expected[o : o + n] for o, n in zip(offsets, sizes, strict=True)] if into else wanted
        total = 0.0
        for dtype in dict.fromkeys(one.dtype for one in tensors if one.numel()):
            chosen = [w for w, t in zip(written, tensors, strict=True) if t.dtype == dtype]
            total += reference_device.moved_sumsq(chosen, max(dtype.itemsize, target_dtype.itemsize))
        assert stats[0].item() == total or (total != total and stats[0].isnan())
        assert stats[1].item() == float(not abs(total) < float("inf"))


KERNELS = {"ferry": ferry_once, "flatten": flatten_once}
assert bucket.TILE_NBYTES == reference_device.TILE_ROWS * reference_device.ROW_NBYTES
