"""The kernels of `cuda/` on the coroutine machine: random lists, late barriers, the bits of the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from coroutine_machine import STAGE, Edit, Machine, build
from lane import is_drawn
from lists import KERNELS
from tables import each

from zerokern.kernels import cuda

QUICK, SLOW = 100, 10_000
COUNT = "looks += thread_number() % 32 == 0"  # one for a warp
LOOKS = (
    Edit("ring.cuh", "template <class List>\n", 'extern "C" {\nu32 looks = 0;\n}\ntemplate <class List>\n'),
    Edit("ring.cuh", "if (low < high && task <", f"if ({COUNT}, low < high && task <"),
    Edit("ring.cuh", "if (list.row[look].first <= task)", f"if ({COUNT}, list.row[look].first <= task)"),
)


def play(machine: Machine, kernel: str, numbers: range) -> None:
    for number in numbers:
        try:
            KERNELS[kernel](machine, number)
        except AssertionError as error:
            raise AssertionError(f"{kernel}, list {number}: {error}") from error


@each("kernel, architecture", [("ferry", 80), ("ferry", 90)])
def test_random_lists(kernel: str, architecture: int, machine: Callable[..., Machine]) -> None:
    play(machine(architecture), kernel, range(QUICK))


@each("most_tasks, looks", [(1, 2), (9, 15)])
def test_a_task_of_a_long_list_is_found_in_few_looks(
    most_tasks: int, looks: int, machine: Callable[..., Machine]
) -> None:
    """By 28 warps, and by the four threads that drive rings if a span is large: each passed 1,344 rows before."""
    played = machine(90, LOOKS)
    sizes = [STAGE * (i % most_tasks) + 24 for i in range(1344)]
    source = torch.arange(sum(sizes), dtype=torch.int64).to(torch.uint8)
    target = torch.zeros_like(source)
    cuda.ferry([*zip(target.split(sizes), source.split(sizes), strict=True)], None, 4)
    assert torch.equal(target, source)
    tasks = sum(-(-size // STAGE) for size in sizes)
    found = ctypes.c_uint32.in_dll(build(played._folder, "ferry", True, LOOKS), "looks").value
    assert 0 < found <= tasks * looks + 28 * 5  # each worker's first task is found by bisection


@pytest.mark.slow
@each("kernel", KERNELS)
def test_more_random_lists(kernel: str, machine: Callable[..., Machine], pytestconfig: pytest.Config) -> None:
    """Three quarters of them with bulk copies, where a kernel has any. A run takes a tenth of all."""
    parts = [part for part in range(0, SLOW, 100) if is_drawn(f"{kernel} {part}", pytestconfig, 0.1)]
    for number, part in enumerate(parts):
        play(machine(90 if number % 4 else 80), kernel, range(QUICK + part, QUICK + part + 100))
