"""The kernels of `cuda/` on the coroutine machine: random lists, late barriers, the bits of the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coroutine_machine import Machine
from lists import KERNELS
from tables import each

QUICK, SLOW = 100, 10_000


def play(machine: Machine, kernel: str, numbers: range) -> None:
    for number in numbers:
        try:
            KERNELS[kernel](machine, number)
        except AssertionError as error:
            raise AssertionError(f"{kernel}, list {number}: {error}") from error


@each("kernel, architecture", [("ferry", 80), ("depart", 80), *((kernel, 90) for kernel in KERNELS)])
def test_random_lists(kernel: str, architecture: int, machine: Callable[..., Machine]) -> None:
    play(machine(architecture), kernel, range(QUICK))


@pytest.mark.slow
@each("kernel", KERNELS)
def test_ten_thousand_random_lists(kernel: str, machine: Callable[..., Machine]) -> None:
    """Three quarters of them with bulk copies, where a kernel has any."""
    play(machine(90), kernel, range(QUICK, QUICK + SLOW * 3 // 4))
    play(machine(80), kernel, range(QUICK, QUICK + SLOW // 4))
