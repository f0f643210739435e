"""gather and scatter on a GPU: the bits that the host machine and the reference have, and what only a GPU can show."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from cuda_cases import DTYPES, laid_out, same, values
from torch import Tensor

from zerokern.kernels import cuda, reference_cuda
from zerokern.memory import Arena

pytestmark = pytest.mark.gpu
MIXED = (0, 1, 2, 3, 5, 7, 8, 9, 15, 17, 64, 100, 1023, 4096, 4097, 8192, 12289, 100_003)


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """A bucket in pinned host memory, full of what a kernel must overwrite."""
    bucket = torch.empty(max(numel, 1), dtype=dtype, pin_memory=True)[:numel]
    return bucket.fill_(-77.0)


def placed(tensors: list[Tensor]) -> list[Tensor]:
    """The same on the GPU, each in memory of its own behind a margin that keeps the alignment."""
    there = []
    for tensor in tensors:
        shift = tensor.data_ptr() % 16 // tensor.itemsize
        room = torch.full((tensor.numel() + shift,), torch.nan, dtype=tensor.dtype, device="cuda")
        there.append(room[shift:].copy_(tensor))
    return there


def gathered(tensors: list[Tensor], dtype: torch.dtype, offsets: list[int], numel: int, scale: float) -> float:
    """Compares a gather with the reference; the sum of squares."""
    bucket, stats = pinned(numel, dtype), torch.full((2,), torch.nan, dtype=torch.float64, device="cuda")
    expected, right = bucket.clone(), torch.empty(2, dtype=torch.float64)
    reference_cuda.gather(tensors, expected, offsets=offsets, scale=scale, stats=right)
    cuda.gather(placed(tensors), bucket, offsets=offsets, scale=scale, stats=stats)
    torch.cuda.synchronize()
    assert same(bucket, expected)
    assert same(stats.cpu(), right)
    return stats[0].item()


def scattered(tensors: list[Tensor], dtype: torch.dtype, offsets: list[int], numel: int, scale: float) -> None:
    bucket, stats = pinned(numel, dtype), torch.full((2,), torch.nan, dtype=torch.float64, device="cuda")
    bucket.copy_(values(numel, dtype))
    expected, right = [torch.empty_like(one) for one in tensors], torch.empty(2, dtype=torch.float64)
    reference_cuda.scatter(bucket, expected, offsets=offsets, scale=scale, stats=right)
    found = placed(tensors)
    cuda.scatter(bucket, found, offsets=offsets, scale=scale, stats=stats)
    torch.cuda.synchronize()
    assert all(same(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    assert same(stats.cpu(), right)


@pytest.mark.parametrize("source, target", list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("misaligned", [0, 1])
def test_every_format(source: torch.dtype, target: torch.dtype, misaligned: int) -> None:
    for numel in (1, 8191, 8192, 8193, 1_000_003):
        tensors = [values(numel, source, misaligned)]
        gathered(tensors, target, [0], numel, scale=0.37)
        scattered(tensors, target, [0], numel, scale=-2.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gaps", [False, True])
def test_lists_of_mixed_dtypes(dtype: torch.dtype, gaps: bool) -> None:
    draw = random.Random(f"{dtype} {gaps}")
    tensors = [values(numel, draw.choice(DTYPES), draw.choice((0, 1, 4))) for numel in MIXED for _ in range(4)]
    draw.shuffle(tensors)
    offsets, numel = laid_out([t.numel() for t in tensors], draw, gaps)
    sums = [gathered(tensors, dtype, offsets, numel, scale=1.5) for _ in range(3)]
    assert len(set(sums)) == 1
    scattered(tensors, dtype, offsets, numel, scale=1.0)


def test_two_thousand_tensors_again_and_again() -> None:
    draw = random.Random(7)
    tensors = [values(draw.randint(1, 4000), torch.bfloat16) for _ in range(2000)]
    there = placed(tensors)
    table, bucket = cuda.HostTable(there, torch.float32), pinned(sum(t.numel() for t in tensors), torch.float32)
    stats = torch.empty(2, dtype=torch.float64, pin_memory=True)
    sums = set()
    for step in range(1, 4):
        bucket.fill_(torch.nan)
        stats.fill_(torch.nan)
        table.gather(there, bucket, scale=0.5, stats=stats)
        torch.cuda.synchronize()
        assert torch.equal(bucket, torch.cat([t.view(-1) for t in tensors]).float() * 0.5)
        sums.add(tuple(stats.tolist()))
        if step == 2:
            there[5] = there[5].clone()
    assert len(sums) == 1 and next(iter(sums))[1] == 0.0


def test_conversions_have_the_bits_of_torch() -> None:
    """Every half of both kinds widened, and around every half the floats that round to it or past it."""
    for narrow in (torch.bfloat16, torch.float16):
        halves = torch.arange(2**16).to(torch.uint16).view(narrow)
        wide = halves.float().view(torch.int32)
        near = torch.cat([wide + d for d in (-(2**15), -(2**12), -1, 0, 1, 2**12, 2**12 + 1, 2**15)]).view(
            torch.float32
        )
        gathered([near], narrow, [0], near.numel(), scale=1.0)
        gathered([halves], torch.float32, [0], halves.numel(), scale=1.0)


def test_an_arena_is_reached() -> None:
    torch.cuda.init()
    arena = Arena(4 << 20)
    with arena.lease(3 << 20, "gradients") as lease:
        bucket = lease.tensor(torch.float32)
        source = torch.randn(bucket.numel(), device="cuda")
        cuda.gather([source], bucket)
        torch.cuda.synchronize()
        assert torch.equal(bucket, source.cpu())
        back = torch.zeros_like(source)
        cuda.scatter(bucket, [back])
        torch.cuda.synchronize()
        assert torch.equal(back, source)
        del bucket
    arena.close()


def test_pageable_memory_is_refused() -> None:
    tensors, bucket = [torch.ones(100, device="cuda")], torch.zeros(1000)
    bucket = bucket[-bucket.data_ptr() % 128 // 4 :][:100]
    for call in (lambda: cuda.gather(tensors, bucket), lambda: cuda.scatter(bucket, tensors)):
        with pytest.raises(ValueError, match="bucket is not pinned, so cuda:0 cannot reach it"):
            call()
    with pytest.raises(ValueError, match="stats is not pinned"):
        cuda.gather(tensors, pinned(100, torch.float32), stats=torch.zeros(2, dtype=torch.float64))


def test_a_scale_that_the_device_computes() -> None:
    source, bucket = torch.randn(10_000, device="cuda"), pinned(10_000, torch.bfloat16)
    scale = torch.ones(1, device="cuda") / 3
    cuda.gather([source], bucket, scale=scale)
    torch.cuda.synchronize()
    assert torch.equal(bucket, (source.cpu() * scale.cpu()).bfloat16())


def test_the_current_stream_is_the_one() -> None:
    """The source is written late, on a side stream; the gather comes after it there."""
    side, source, bucket = torch.cuda.Stream(), torch.zeros(100_000, device="cuda"), pinned(100_000, torch.float32)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        source.fill_(3.0)
        cuda.gather([source], bucket)
    side.synchronize()
    assert bucket.eq(3.0).all()


def test_a_graph_gathers_at_each_replay() -> None:
    source, bucket = torch.zeros(50_000, device="cuda"), pinned(50_000, torch.float32)
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    table = cuda.HostTable([source], torch.float32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        table.gather([source], bucket, stats=stats)  # loads the module and the memory that a capture may not ask for
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        table.gather([source], bucket, stats=stats)
    for value in (1.0, 2.0, 3.0):
        source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bucket.eq(value).all() and stats.tolist() == [50_000 * value * value, 0.0]
    table.gather([source.mul_(2)], bucket, stats=stats)
    torch.cuda.synchronize()
    assert bucket.eq(6.0).all()


@pytest.mark.slow
def test_more_elements_than_an_int_counts() -> None:
    numel = 2**31 + 4099
    source = torch.randint(-8, 8, (numel,), device="cuda", dtype=torch.int8).to(torch.bfloat16)
    bucket = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)
    stats = torch.empty(2, dtype=torch.float64, device="cuda")
    cuda.gather([source[:5000], source[5000:]], bucket, stats=stats)
    torch.cuda.synchronize()
    assert torch.equal(bucket.to("cuda"), source)
    squares = sum(piece.double().square().sum().item() for piece in source.split(1 << 28))
    assert stats.tolist() == [squares, 0.0], "sums of small whole numbers are exact"
    source.zero_()
    cuda.scatter(bucket, [source])
    torch.cuda.synchronize()
    assert torch.equal(bucket.to("cuda"), source)
