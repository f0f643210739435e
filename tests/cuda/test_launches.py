"""What the launchers do with lists: how many launches, what they refuse, long lists, strided ones, other addresses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from coroutine_machine import STAGE, Machine
from faults import FAULTS
from kernel_cases import same_bits, spread_values
from torch import Tensor

from zerokern.core.errors import BackendError
from zerokern.kernels import cuda, flat, reference_device
from zerokern.kernels.cuda import bucket, loader, rows, spans, trial
from zerokern.kernels.triton.backend import interpreted
from zerokern.memory.span_copies import CopyKernels, _of_cuda

MACHINE = Callable[..., Machine]
BF16, FP32 = torch.bfloat16, torch.float32


def values(numel: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def test_a_list_is_one_launch_for_1344_spans(machine: MACHINE) -> None:
    played = machine()
    source = torch.arange(1400, dtype=torch.int32)
    target = torch.zeros_like(source)
    cuda.ferry([(target[i : i + 1], source[i : i + 1]) for i in range(1400)], None, 3)
    assert torch.equal(target, source)
    assert played.launched == [("ferry_many", 3, 1344), ("ferry_many", 3, 56)]
    cuda.ferry([(target[:32], source[:32])], None, 8)
    assert played.launched[2:] == [("ferry_few", 1, 1)]  # one stage has work for one


def test_copies_of_small_spans_take_it_before_triton(machine: MACHINE) -> None:
    """By addresses, on the current stream, as `zerokern.memory` launches its kernels."""
    played = machine()
    source = torch.arange(500, dtype=torch.int32)
    target = torch.zeros_like(source)
    spans_ = [(target.data_ptr() + at, source.data_ptr() + at, 40) for at in range(0, 2000, 40)]
    kernels = CopyKernels(_of_cuda(torch.device("cpu")))
    assert [name for name, _ in kernels.ways] == ["CUDA"]
    assert kernels.launch(spans_, torch.empty(0)) and torch.equal(target, source)
    assert played.launched[1:] == [("ferry_many", 4, 50)]  # the first was a trial
    cuda.ferry_spans([], torch.device("cpu"))
    assert len(played.launched) == 2


def test_a_long_list_is_flattened_with_one_sum(machine: MACHINE) -> None:
    played = machine()
    tensors = [values(2 + i % 5) for i in range(1400)]
    bucket, stats = torch.zeros(sum(t.numel() for t in tensors)), torch.zeros(2, dtype=torch.float64)
    flat.flatten(tensors, bucket, stats=stats, impl="cuda")
    assert same_bits(bucket, torch.cat(tensors)) and stats[0].item() == reference_device.moved_sumsq(tensors, 4)
    assert [name for name, _, _ in played.launched] == ["flatten_f32_f32_stats_many"] * 2


def test_what_is_not_finite_is_told(machine: MACHINE) -> None:
    machine()
    for bad in (math.nan, math.inf, -math.inf):
        source, stats = values(40_000), torch.zeros(2, dtype=torch.float64)
        source[20_005] = bad
        flat.flatten([source], torch.empty(40_000), stats=stats, impl="cuda")
        assert not math.isfinite(stats[0]) and stats[1] == 1.0


def test_a_list_with_views_has_the_bits_of_triton(machine: MACHINE) -> None:
    """Also of its sum: contiguous tensors of each dtype first, then the others, in Triton's order."""
    pytest.importorskip("triton", reason="needs triton")
    if not interpreted():
        pytest.skip("runs interpreted; test_on_gpu.py has the GPU's turn")
    played = machine()

    def fresh() -> list[Tensor]:
        return [values(700), values(70 * 40, BF16).view(70, 40).t(), values(33, BF16), values(12).view(3, 4).t()]

    results = []
    for impl in ("cuda", "triton"):
        tensors = fresh()
        bucket, stats = torch.zeros(sum(t.numel() for t in tensors)), torch.zeros(2, dtype=torch.float64)
        flat.flatten(tensors, bucket, scale=0.3, stats=stats, impl=impl)
        stats_back = torch.zeros(2, dtype=torch.float64)
        flat.unflatten(bucket, tensors, scale=7.0, stats=stats_back, impl=impl)
        results.append((bucket, stats, stats_back, *(t.contiguous() for t in tensors)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert {name.partition("_stats")[0] for name, _, _ in played.launched} == {
        "flatten_f32_f32", "flatten_bf16_f32", "flatten_f32_bf16",
    }  # fmt: skip


def test_other_addresses_cost_no_upload(machine: MACHINE, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's argument has them: each run is a launch and nothing else."""
    played = machine()
    flattener = flat.Flattener([torch.empty(50), torch.empty(7)], BF16, impl="cuda")
    for seed in range(3):
        tensors, bucket = [values(50) + seed, values(7) - seed], torch.zeros(57, dtype=BF16)
        flattener.flatten(tensors, bucket)
        assert same_bits(bucket, torch.cat(tensors).to(BF16))
        flattener.unflatten(bucket, tensors, scale=2.0)
        assert same_bits(torch.cat(tensors), bucket.float() * 2.0)
    assert [name for name, _, _ in played.launched] == ["flatten_f32_bf16_few", "flatten_bf16_f32_few"] * 3


def test_arguments_are_made_once_and_other_addresses_filled_in(
    machine: MACHINE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients lie elsewhere in each backward pass. Two dtypes, and more rows than a launch takes."""
    machine()
    made = []
    laid_out = bucket.BucketLaunches._laid_out
    monkeypatch.setattr(
        bucket.BucketLaunches, "_laid_out", lambda self, *given: made.append(1) or laid_out(self, *given)
    )
    sizes = [(1 + i % 3, FP32 if i % 7 else BF16) for i in range(1700)]
    flattener = flat.Flattener([torch.empty(n, dtype=kind) for n, kind in sizes], FP32, impl="cuda")
    for seed in range(3):
        tensors = [values(n, kind) + seed for n, kind in sizes]
        one = torch.zeros(flattener.numel + seed)
        flattener.flatten(tensors, one)
        assert same_bits(one[: flattener.numel], torch.cat([t.float() for t in tensors]))
        flattener.unflatten(one, tensors, scale=2.0)
        assert same_bits(torch.cat([t.float() for t in tensors]), one[: flattener.numel] * 2.0)
    assert len(made) == 2  # one for each direction


def test_an_interrupt_while_addresses_are_filled_in_mixes_no_lists(
    machine: MACHINE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run after it has the addresses of the run before it, which half of the arguments have lost."""
    machine()
    flattener = flat.Flattener([torch.empty(5), torch.empty(7, dtype=BF16)], FP32, impl="cuda")
    first, second = ([values(5) + seed, values(7, BF16) + seed] for seed in (0, 1))
    bucket_ = torch.zeros(flattener.numel)
    flattener.flatten(first, bucket_)
    ends, calls = bucket.BucketLaunches._ends, itertools.count(1)

    def interrupted(self: bucket.BucketLaunches, *given: object) -> tuple[list[int], list[int]]:
        if next(calls) == 2:  # the first of two dtypes has been filled in
            raise KeyboardInterrupt
        return ends(self, *given)

    monkeypatch.setattr(bucket.BucketLaunches, "_ends", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flattener.flatten(second, bucket_)
    flattener.flatten(first, bucket_)
    assert same_bits(bucket_, torch.cat([t.float() for t in first]))


def test_a_span_that_is_in_its_place_is_scaled_there(machine: MACHINE) -> None:
    machine()
    bucket = torch.arange(10.0)
    flat.flatten([bucket[:4], bucket[4:]], bucket, scale=2.0, impl="cuda")
    assert same_bits(bucket, torch.arange(10.0) * 2.0)


def test_stats_of_nothing_are_zero(machine: MACHINE) -> None:
    machine()
    stats = torch.full((2,), math.nan, dtype=torch.float64)
    flat.flatten([torch.empty(0)], torch.ones(3), stats=stats, impl="cuda")
    assert stats.tolist() == [0.0, 0.0]


def test_a_row_of_more_than_2_to_the_31_elements_is_several() -> None:
    (part,) = rows.parts_of([16], [32], [(1 << 32) + 5], (2, 4), 65536)
    assert part.rows["size"].tolist() == [1 << 31, 1 << 31, 5]
    assert part.rows["to"].tolist() == [16, 16 + (2 << 31), 16 + (4 << 31)]
    assert part.rows["from"].tolist() == [32, 32 + (4 << 31), 32 + (8 << 31)]
    assert part.rows["first"].tolist() == [0, 1 << 15, 1 << 16] and part.tasks == (1 << 16) + 1


def test_tasks_of_later_launches_are_numbered_from_their_own_first() -> None:
    parts = rows.parts_of([0] * 3000, [0] * 3000, [10] * 3000, (1, 1), 4)
    assert [(p.first, p.tasks, len(p.rows)) for p in parts] == [(0, 4032, 1344), (4032, 4032, 1344), (8064, 936, 312)]
    assert all(part.rows["first"][:2].tolist() == [0, 3] for part in parts)


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="Pass it in parts"):
        rows.parts_of([0] * 3, [0] * 3, [1 << 31] * 3, (1, 1), 1)


def test_bad_pairs_are_refused_and_nothing_is_written(machine: MACHINE) -> None:
    played = machine()
    one, two = torch.zeros(8), torch.ones(8)
    for pairs, error, says in (
        ([(one, two[:4])], ValueError, r"pairs\[0\] copies 8 elements of torch.float32 from 4"),
        ([(one, two.double())], ValueError, "the same number and dtype"),
        ([(one, two), (one[4:], two[:4])], ValueError, r"dst of pairs\[0\] and dst of pairs\[1\] share memory"),
        (
            [(one[:4], two[:4]), (two[4:], one[2:6])],
            ValueError,
            r"dst of pairs\[0\] and src of pairs\[1\] share memory",
        ),
        ([(one.view(2, 4).t(), two.view(4, 2))], ValueError, "contiguous"),
        ([(one, "two")], TypeError, r"src of pairs\[0\] is a str"),
    ):
        with pytest.raises(error, match=says):
            cuda.ferry(pairs)
    with pytest.raises(ValueError, match="ctas=0"):
        cuda.ferry([(one, two)], None, 0)
    assert played.launched == [] and (one == 0).all()


def test_pageable_memory_is_refused(machine: MACHINE, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)
    with pytest.raises(ValueError, match=r"dst of pairs\[0\] is in pageable memory of meta"):
        spans._check_reached("dst of pairs[0]", torch.zeros(1, device="meta"), torch.device("cpu"))


def test_without_a_gpu_they_are_refused_by_name() -> None:
    for run in (
        lambda: cuda.ferry([(torch.zeros(1), torch.ones(1))]),
        lambda: flat.flatten([torch.ones(1)], torch.ones(1), impl="cuda"),
    ):
        with pytest.raises(BackendError, match="CUDA kernels run on cuda devices, not on cpu"):
            run()


def test_without_cupy_triton_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the implementation is chosen by what is there."""
    asked = []
    monkeypatch.setattr(loader, "reason", lambda device: asked.append(device.type) or "cupy is not installed")
    bucket = torch.zeros(3)
    flat.flatten([spread_values(3, torch.Generator())], bucket)
    assert asked == []  # nobody asks for a CPU's tensors
    assert not cuda.available(torch.device("cuda", 0)) and asked == ["cuda"]


def test_a_first_launch_is_a_trial(machine: MACHINE, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, played = torch.device("cpu"), machine()
    assert cuda.available(cpu) and cuda.available(cpu)
    assert played.launched == [("flatten_bf16_f32_stats_few", 5, 3)]
    trial._failure.cache_clear()
    monkeypatch.setattr(played, "RawModule", None)
    loader._module.cache_clear(), loader._kernel.cache_clear(), bucket._kernel.cache_clear()
    assert not cuda.available(cpu)
    assert "a first launch failed: TypeError" in trial._failure(cpu)


def test_wrong_bits_are_not_used(machine: MACHINE) -> None:
    (fault,) = (one for one in FAULTS if one.name == "last_two_columns_not_added")
    machine(90, (fault.edit,))
    assert not cuda.available(torch.device("cpu"))
    assert "other bits than its reference" in trial._failure(torch.device("cpu"))


def test_nothing_is_tried_within_a_capture(machine: MACHINE, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, played = torch.device("cpu"), machine()
    monkeypatch.setattr(trial, "capturing", lambda device: True)
    assert not cuda.available(cpu) and played.launched == []
    monkeypatch.setattr(trial, "capturing", lambda device: False)
    assert cuda.available(cpu)
    monkeypatch.setattr(trial, "capturing", lambda device: True)
    assert cuda.available(cpu)


def test_stages_fit_the_shared_memory_of_an_architecture() -> None:
    most = {80: 163, 90: 227, 100: 227, 103: 227, 120: 99}
    for architecture, kib in most.items():
        assert spans.ferry_shared(architecture) <= kib << 10
    assert STAGE % 128 == 0
