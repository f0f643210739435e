"""gather and scatter as the kernels of cuda/ do them, on the host machine: the reference's bits, every access in its
place, whole lines over the link."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from cuda_cases import DTYPES, Machine, aligned, laid_out, same, values

from zerokern.kernels import cuda, reference_cuda

TILE = 16 << 10
FORMATS = list(itertools.product(DTYPES, DTYPES))
MIXED = (0, 1, 2, 3, 5, 7, 8, 9, 15, 17, 64, 100, 1023, 4096, 4097, 8192, 12289)


class Round:
    """One list of tensors, a bucket, and what the reference makes of them."""

    def __init__(self, machine: Machine, tensors: list[torch.Tensor], dtype: torch.dtype, gaps: bool) -> None:
        self.machine, self.tensors = machine, tensors
        self.offsets, numel = laid_out([t.numel() for t in tensors], random.Random(numel_key(tensors)), gaps)
        self.bucket = aligned(numel, dtype)
        self.stats = torch.full((2,), torch.nan, dtype=torch.float64)

    def allow(self, op: str) -> None:
        self.machine.clear()
        self.machine.allow(self.bucket, writable=op == "gather", link=True)
        for tensor in self.tensors:
            self.machine.allow(tensor, writable=op == "scatter")

    def gather(self, scale: float = 1.0) -> None:
        expected, stats = self.bucket.clone(), torch.empty(2, dtype=torch.float64)
        reference_cuda.gather(self.tensors, expected, offsets=self.offsets, scale=scale, stats=stats)
        self.allow("gather")
        cuda.gather(self.tensors, self.bucket, offsets=self.offsets, scale=scale, stats=self.stats)
        assert same(self.bucket, expected)
        assert same(self.stats, stats)

    def scatter(self, scale: float = 1.0) -> None:
        expected, stats = [t.clone() for t in self.tensors], torch.empty(2, dtype=torch.float64)
        reference_cuda.scatter(self.bucket, expected, offsets=self.offsets, scale=scale, stats=stats)
        self.allow("scatter")
        cuda.scatter(self.bucket, self.tensors, offsets=self.offsets, scale=scale, stats=self.stats)
        assert all(same(found, right) for found, right in zip(self.tensors, expected, strict=True))
        assert same(self.stats, stats)


def numel_key(tensors: list[torch.Tensor]) -> str:
    return repr([t.numel() for t in tensors])


@pytest.mark.parametrize("source, target", FORMATS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("numel", [1, 7, 8, 4095, 4096, 8192, 8193, 3 * 8192 + 5])
def test_one_tensor_of_every_format(machine: Machine, source: torch.dtype, target: torch.dtype, numel: int) -> None:
    for misaligned in (0, 1):
        one = Round(machine, [values(numel, source, misaligned)], target, gaps=False)
        one.gather(scale=0.37)
        one.bucket.copy_(values(numel, target))
        one.scatter(scale=-2.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lists_of_mixed_dtypes(machine: Machine, dtype: torch.dtype, gaps: bool, seed: int) -> None:
    draw = random.Random(seed)
    tensors = [values(numel, draw.choice(DTYPES), draw.choice((0, 0, 1, 4))) for numel in MIXED for _ in range(2)]
    draw.shuffle(tensors)
    mixed = Round(machine, tensors, dtype, gaps)
    mixed.gather(scale=1.5)
    mixed.bucket.copy_(values(mixed.bucket.numel(), dtype))
    mixed.scatter()


def test_a_thousand_tensors_of_one_element(machine: Machine) -> None:
    tiny = Round(machine, [values(1, DTYPES[i % 3]) for i in range(1000)], torch.bfloat16, gaps=False)
    tiny.gather()
    tiny.scatter(scale=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_element_that_is_not_finite_is_told(machine: Machine, dtype: torch.dtype, bad: float) -> None:
    tensors = [values(5000, dtype) for _ in range(4)]
    tensors[2][4321] = bad
    found = Round(machine, tensors, torch.bfloat16, gaps=False)
    found.gather()
    assert found.stats[1] == 1.0 and not found.stats[0].isfinite()
    found.scatter()
    assert found.stats[1] == 1.0


def test_what_overflows_on_the_way_is_not_finite(machine: Machine) -> None:
    wide = Round(machine, [torch.tensor([1e5, -1.0])], torch.float16, gaps=False)
    wide.gather()
    assert wide.bucket.tolist() == [torch.inf, -1.0] and wide.stats.tolist() == [torch.inf, 1.0]


def test_extreme_values_keep_their_bits(machine: Machine) -> None:
    words = torch.tensor(
        [0, 1, 2**31, 2**31 + 1, 0x7F7FFFFF, 0x00800000, 0x33000001, 0x477FEFFF, 0x3F808000, 0x3F818000]
    )
    floats = words.to(torch.int64).to(torch.uint32).view(torch.float32)
    for dtype in DTYPES:
        Round(machine, [floats], dtype, gaps=False).gather()
    halves = torch.arange(2**16).to(torch.uint16)
    for narrow in (torch.bfloat16, torch.float16):
        every = Round(machine, [torch.empty(2**16)], narrow, gaps=False)
        every.bucket.copy_(halves.view(narrow))
        every.scatter()
        every.gather()


@pytest.mark.parametrize("blocks", [1, 2, 5, 64])
def test_the_sum_does_not_depend_on_the_grid(machine: Machine, blocks: int) -> None:
    tensors = [values(numel, torch.float32) for numel in (100_000, 7, 33_333)]
    machine.multiprocessors = blocks
    sums = []
    for seed in range(3):
        machine.seed = seed
        one = Round(machine, tensors, torch.float32, gaps=False)
        one.gather()
        sums.append(one.stats[0].item())
    assert len(set(sums)) == 1
    assert machine.launches == [("gather_fp32", min(blocks, 33))] * 3
    exact = sum((t.double() ** 2).sum().item() for t in tensors)
    assert sums[0] == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("source, target", FORMATS, ids=lambda d: str(d).removeprefix("torch."))
def test_the_link_carries_whole_lines(machine: Machine, source: torch.dtype, target: torch.dtype) -> None:
    """Of large tensors, each access over the link has 16 bytes; those of a warp lie side by side by construction."""
    numel = 5 * TILE // target.itemsize
    one = Round(machine, [values(numel, source)], target, gaps=False)
    for op in ("gather", "scatter"):
        getattr(one, op)()
        assert machine.count(store=op == "gather", link=True) == {16: 5 * TILE // 16}
        assert machine.count(store=op != "gather", link=True) == {}
        widest = 8 if source.itemsize < target.itemsize else 16
        assert machine.count(store=op != "gather", link=False) == {widest: numel * source.itemsize // widest}


def test_ragged_groups_cross_the_link_once(machine: Machine) -> None:
    """scatter reads a group in which tensors meet as a whole; gather writes each of its elements once."""
    tensors = [values(3, torch.float32) for _ in range(800)]
    ragged = Round(machine, tensors, torch.bfloat16, gaps=False)
    ragged.scatter()
    assert machine.count(store=False, link=True) == {16: 300}
    ragged.gather()
    assert machine.count(store=True, link=True) == {2: 2400}


def test_scale_from_device_memory(machine: Machine) -> None:
    tensors, scale = [values(1000, torch.float32)], torch.tensor([0.1])
    bucket, expected = aligned(1000, torch.bfloat16), torch.empty(1000, dtype=torch.bfloat16)
    reference_cuda.gather(tensors, expected, offsets=[0], scale=scale.item())
    for tensor in (bucket, tensors[0], scale):
        machine.allow(tensor, writable=tensor is bucket)
    cuda.gather(tensors, bucket, scale=scale)
    assert same(bucket, expected)


def test_without_stats_nothing_is_summed(machine: Machine) -> None:
    tensors = [values(70_000, torch.bfloat16)]
    table = cuda.HostTable(tensors, torch.float32)
    bucket = aligned(70_000, torch.float32)
    machine.allow(bucket, writable=True, link=True)
    machine.allow(tensors[0], writable=False)
    table.gather(tensors, bucket)
    assert same(bucket, tensors[0].float())
    assert table._residents[0].partials.isnan().all(), "nobody asked for sums"


def test_an_empty_list_and_empty_tensors(machine: Machine) -> None:
    bucket, stats = aligned(10, torch.float32), torch.full((2,), torch.nan, dtype=torch.float64)
    before = bucket.clone()
    cuda.gather([], bucket, stats=stats)
    assert stats.tolist() == [0.0, 0.0]
    stats.fill_(torch.nan)
    cuda.gather([torch.empty(0), torch.empty(0, 5)], bucket, stats=stats)
    assert stats.tolist() == [0.0, 0.0] and same(bucket, before)
    cuda.scatter(bucket, [torch.empty(0)])
    assert machine.launches == [("gather_fp32", 1)]
