"""Squares measured chunk by chunk: one sum for a tensor, whoever measured it, and a grid that fills the GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from zerokern.kernels import ops, reference, squares
from zerokern.kernels.squares import ChunkSums, Squares
from zerokern.kernels.triton import sumsq, upload

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = reference.SUMSQ_CHUNK


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of one magnitude, so that every addition rounds."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype).to(DEVICE)


def measured(tensors: list[Tensor], impl: str | None) -> list[float]:
    sums = ChunkSums([one.numel() for one in tensors], [one.dtype for one in tensors], impl=impl)
    there = torch.full((sums.count,), math.nan, dtype=torch.float64, device=DEVICE)
    sums.measure(tensors, there)
    return list(sums.added(there.cpu()))


@each("wide", [False, True])
@each("impl", ["reference", "triton", None])
def test_a_tensor_has_one_sum_whoever_measures_it(impl: str | None, wide: bool, monkeypatch: Any) -> None:
    """Beside others or alone, at any alignment, in lists of several dtypes."""
    if wide:
        monkeypatch.setattr(sumsq, "PROGRAMS_EACH", 0)
    if impl is None and DEVICE.type == "cpu":
        impl = "cpu.scalar"
    tensors = [values(5), values(0), values(300, torch.bfloat16), values(4097), values(2000)[1:]]
    tensors += [values(1200, torch.float16)[3:], values(1)]
    found = measured(tensors, impl)
    assert found == [ops.sumsq([one.cpu()]) for one in tensors]
    assert found[4:] == [measured([one], impl)[0] for one in tensors[4:]]


@each("dtype", DTYPES)
def test_both_shapes_have_the_bits_of_the_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [values(64 * 65 + 3, dtype), values(64 * 128, dtype), values(63, dtype), values(64 * 64, dtype)]
    sums = []
    for programs in (0, 4):
        monkeypatch.setattr(sumsq, "PROGRAMS_EACH", programs)
        sums.append(measured(tensors, "triton"))
    assert sums[0] == sums[1] == [reference.sumsq([one.cpu()]) for one in tensors]


@each("bad", [math.nan, math.inf])
def test_one_element_that_is_not_finite_shows_in_its_own_sum(bad: float) -> None:
    tensors = [values(1005), values(300)]
    tensors[0][1004] = bad
    for impl in ("reference", "triton"):
        first, second = measured(tensors, impl)
        assert not math.isfinite(first) and math.isfinite(second)


def test_memory_that_moves_as_one_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    refresh = upload.refresh
    monkeypatch.setattr(upload, "refresh", lambda words, fresh: (sent.append(len(fresh)), refresh(words, fresh)))
    sums = ChunkSums([70, 30], [torch.float32] * 2, impl="triton")
    there = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    buckets = [values(100), values(101)[1:], values(102)[2:]]
    for bucket in buckets:
        sums.measure([bucket[:70], bucket[70:]], there)
        assert list(sums.added(there.cpu())) == [ops.sumsq([one.cpu()]) for one in (bucket[:70], bucket[70:])]
    assert not sent
    sums.measure([buckets[0][:70], buckets[1][70:]], there)
    assert sent == [2]


def test_many_chunks_are_added_one_after_the_other() -> None:
    """As `reference.sumsq` does, whoever adds: torch or Python."""
    counts = [1, squares.MANY, squares.MANY + 1, 5000, 0, 3]
    chunks = torch.rand(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for some in chunks.split(counts):
        total = 0.0
        for one in some.tolist():
            total += one
        expected.append(total)
    sums = ChunkSums([CHUNK * count for count in counts], [torch.bfloat16] * len(counts))
    assert list(sums.added(chunks)) == expected


def test_squares_that_are_dropped_are_measured_anew() -> None:
    wanted = Squares([(1, 2)])
    wanted.sums, wanted.later = ops.sumsq, lambda: 0  # type: ignore[assignment]
    wanted.forget()
    assert wanted.sums is wanted.later is None
    assert [one.tolist() for one in wanted.of(torch.arange(4))] == [[1, 2]]


def warps_each(numel: int, width: int, multiprocessors: int) -> tuple[float, float]:
    """Programs and warps of a list's grid for each multiprocessor."""
    nchunks = -(-numel // CHUNK)
    shape = sumsq.shape_of(nchunks, width, multiprocessors)
    programs = -(-nchunks // shape.chunks)
    return programs / multiprocessors, programs * shape.num_warps / multiprocessors


@each("width", [2, 4])
@each("multiprocessors", [108, 132, 148])
def test_a_grid_fills_the_gpu_as_far_as_the_order_allows(width: int, multiprocessors: int) -> None:
    """A chunk has 64 chains of additions, so two warps of one chain a thread: there are no more to be had."""
    for numel in (1 << exponent for exponent in range(16, 36)):
        programs, warps = warps_each(numel, width, multiprocessors)
        most = 2 * -(-numel // CHUNK)  # warps that the order allows
        assert warps >= min(4, most / multiprocessors), numel
        assert programs >= min(4, numel // CHUNK / multiprocessors), numel
    # so every multiprocessor has two warps from 8.7 million elements on (132 of them), and two programs from 17.3
    assert warps_each(2 * multiprocessors * CHUNK // 2, width, multiprocessors)[1] >= 2
    assert warps_each(2 * multiprocessors * CHUNK, width, multiprocessors)[0] >= 2
