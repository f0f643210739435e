"""Sums of squares in integers have the bits of float64: on every pair of exponents, at every tie, for what is tiny,
huge and no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from zerokern.kernels import flat, reference, reference_device
from zerokern.kernels.triton import backend, sumsq, wide
from zerokern.kernels.triton.codecs import TYPES

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 1024
REPEATS = 3


@triton.jit
def add_squares(out, sums, values, numel, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(values.to(tl.pointer_type(TYPE)) + at, mask=mask, other=0.0)
    before = tl.load(sums + at, mask=mask, other=0.0)
    after = wide.add_squares(before[None, :], x[None, None, :], 1)
    tl.store(out + at, tl.reshape(after, (BLOCK,)), mask=mask)


@triton.jit
def squared(out, values, numel, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    tl.store(out + at, wide.squared(tl.load(values.to(tl.pointer_type(TYPE)) + at, mask=mask, other=0.0)), mask=mask)


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, both ways run on numpy; compiled, the GPU decides."""
    if backend.interpreted():
        monkeypatch.setattr(wide, "float64_is_scarce", lambda: True)


def same(sums: Tensor, values: Tensor) -> None:
    """float64 of the CPU says what is right; a NaN is a NaN."""
    expected = sums + values.double() * values.double()  # a square is exact
    out = torch.empty_like(sums, device=DEVICE)
    given, address = sums.to(DEVICE), values.contiguous().to(DEVICE)
    grid = (-(-sums.numel() // BLOCK),)
    add_squares[grid](out, given, address.data_ptr(), sums.numel(), TYPE=TYPES[values.dtype], BLOCK=BLOCK)
    found, wanted = (torch.where(one.isnan(), torch.nan, one).view(torch.int64) for one in (out.cpu(), expected))
    wrong = (found != wanted).nonzero().flatten()[:5].tolist()
    assert not wrong, [(sums[i].item().hex(), float(values[i]).hex(), out[i].item().hex()) for i in wrong]


def every(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_every_narrow_value_on_sums_of_all_sizes(dtype: torch.dtype) -> None:
    values = every(dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(REPEATS):
        around = values.double().square() * 2.0 ** torch.randint(-64, 65, values.shape, generator=generator)
        noise = 1.0 + torch.rand(values.shape, generator=generator, dtype=torch.float64)
        same((around * noise).nan_to_num(1.0, 1.0), values)
    same(torch.zeros(values.shape, dtype=torch.float64), values)


def random_floats(numel: int, seed: int) -> Tensor:
    """All bits at random, so all exponents alike, subnormals, infinities and NaN among them."""
    words = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=torch.Generator().manual_seed(seed))
    return words.to(torch.int32).view(torch.float32)


@each("dtype", DTYPES)
def test_squares_are_those_of_float64(dtype: torch.dtype) -> None:
    values = torch.cat([random_floats(1 << 16, 3), torch.tensor([0.0, -0.0, 1e-45])])
    values = values if dtype == torch.float32 else every(dtype)
    out = torch.empty(values.shape, dtype=torch.float64, device=DEVICE)
    given = values.to(DEVICE)
    squared[(-(-values.numel() // BLOCK),)](out, given.data_ptr(), values.numel(), TYPE=TYPES[dtype], BLOCK=BLOCK)
    found, wanted = (torch.where(one.isnan(), torch.nan, one) for one in (out.cpu(), values.double().square()))
    assert torch.equal(found.view(torch.int64), wanted.view(torch.int64))


def test_random_values_on_random_sums() -> None:
    for seed in range(REPEATS):
        values = random_floats(1 << 16, seed)
        earlier = random_floats(1 << 16, 1000 + seed).double().square() * (1.0 + torch.rand(1 << 16).double())
        same(earlier, values)


def test_sums_in_which_the_value_before_is_the_next_one() -> None:
    """As a lane adds them: of one magnitude, with squares that are rounded at every addition."""
    sums = torch.zeros(1 << 12, dtype=torch.float64)
    for seed in range(30):
        values = torch.randn(1 << 12, generator=torch.Generator().manual_seed(seed))
        same(sums, values)
        sums = sums + values.double().square()


@each("bits", [1, 2, 11, 24])
def test_ties_and_their_neighbours(bits: int) -> None:
    """Squares whose last bit is half of the sum's last place, a quarter, an eighth; sums that end in 0, 1 or all 1s."""
    generator = torch.Generator().manual_seed(bits)
    odd = 2 * torch.randint(1 << (bits - 1), 1 << bits, (1 << 14,), generator=generator) + 1
    values = odd.float() * 2.0 ** torch.randint(-60, 30, odd.shape, generator=generator)
    lowest = values.double() / odd * values.double() / odd  # the last bit of the square
    ends = torch.tensor([0, 1, 2, 3, (1 << 52) - 1, (1 << 52) - 2])[torch.randint(0, 6, odd.shape, generator=generator)]
    last_place = lowest * 2.0 ** torch.randint(0, 4, odd.shape, generator=generator)
    same(last_place * ((1 << 52) + ends).double(), values)


def test_what_is_no_number() -> None:
    inf, nan = float("inf"), float("nan")
    sums = torch.tensor([0.0, 1.0, inf, inf, nan, nan, 1.0, inf, 2.0], dtype=torch.float64)
    same(sums, torch.tensor([inf, nan, 1.0, nan, 1.0, inf, -inf, -inf, -0.0]))
    same(torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, -0.0, 1e-45]))


@each("programs", [0, 4])
@each("dtype", DTYPES)
def test_whole_lists_have_the_bits_of_the_reference(
    dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the shapes of a GPU that adds in integers, those of a list that fills it and of one that does not."""
    monkeypatch.setattr(sumsq, "_gpu", lambda device: (132, True))
    monkeypatch.setattr(sumsq, "PROGRAMS_EACH", programs)
    values = torch.randn(6000, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    out = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    sumsq.SumsqTable(DEVICE, [6000], dtype).run(torch.tensor([values.data_ptr()], device=DEVICE), out)
    assert out.item() == reference.sumsq([values.cpu()])


@each("target", DTYPES[:2])
def test_statistics_of_flatten_have_the_bits_of_their_reference(target: torch.dtype) -> None:
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(DEVICE) for numel in (5000, 5, 99)]
    tensors.append(torch.randn(40, 30, generator=torch.Generator().manual_seed(2)).to(DEVICE).t())
    bucket = torch.zeros(sum(one.numel() for one in tensors), dtype=target, device=DEVICE)
    sums: list[Any] = []
    for scarce in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if backend.interpreted():
                patch.setattr(wide, "float64_is_scarce", lambda scarce=scarce: scarce)
            stats = torch.zeros(2, dtype=torch.float64, device=DEVICE)
            flat.flatten(tensors, bucket, stats=stats, impl="triton")
            sums.append(stats.tolist())
    assert sums[0] == sums[1]
    alone = [tensors[0].to(target).cpu()]
    stats = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    flat.flatten(tensors[:1], bucket[:5000], stats=stats, impl="triton")
    assert stats.tolist() == [reference_device.moved_sumsq(alone, 4), 0.0]
