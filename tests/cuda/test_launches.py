"""What the launchers do with lists: how many launches, what they refuse, long lists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from coroutine_machine import STAGE, Machine
from torch import Tensor

from zerokern.core.errors import BackendError
from zerokern.kernels import cuda
from zerokern.kernels.cuda import loader, rows, spans
from zerokern.kernels.spans import rows_of
from zerokern.memory.span_copies import _of_cuda

MACHINE = Callable[..., Machine]


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
    copied = rows_of([(target.data_ptr() + at, source.data_ptr() + at, 40) for at in range(0, 2000, 40)])
    ((name, copy),) = _of_cuda(torch.device("cpu"))
    copy(copied, torch.empty(0))
    assert name == "CUDA" and torch.equal(target, source)
    assert played.launched == [("ferry_many", 4, 50)]
    cuda.ferry_spans([], torch.device("cpu"))
    assert len(played.launched) == 1


def test_a_row_of_more_than_2_to_the_31_bytes_is_several() -> None:
    (part,) = rows.parts_of([16], [32], [(1 << 32) + 5], 65536)
    assert part.rows["size"].tolist() == [1 << 31, 1 << 31, 5]
    assert part.rows["to"].tolist() == [16, 16 + (1 << 31), 16 + (2 << 31)]
    assert part.rows["from"].tolist() == [32, 32 + (1 << 31), 32 + (2 << 31)]
    assert part.rows["first"].tolist() == [0, 1 << 15, 1 << 16] and part.tasks == (1 << 16) + 1


def test_tasks_of_later_launches_are_numbered_from_their_own_first() -> None:
    parts = rows.parts_of([0] * 3000, [0] * 3000, [10] * 3000, 4)
    assert [(part.tasks, len(part.rows)) for part in parts] == [(4032, 1344), (4032, 1344), (936, 312)]
    assert all(part.rows["first"][:2].tolist() == [0, 3] for part in parts)


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="Pass it in parts"):
        rows.parts_of([0] * 3, [0] * 3, [1 << 31] * 3, 1)


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
    with pytest.raises(BackendError, match="CUDA kernels run on cuda devices, not on cpu"):
        cuda.ferry([(torch.zeros(1), torch.ones(1))])


def test_without_cupy_triton_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernel is chosen by what is there."""
    monkeypatch.setattr(loader, "reason", lambda device: "cupy is not installed")
    assert not cuda.available(torch.device("cuda", 0)) and _of_cuda(torch.device("cuda", 0)) == []


def test_stages_fit_the_shared_memory_of_an_architecture() -> None:
    most = {80: 163, 90: 227, 100: 227, 103: 227, 120: 99}
    for architecture, kib in most.items():
        assert spans.ferry_shared(architecture) <= kib << 10
    assert STAGE % 128 == 0
