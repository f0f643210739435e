"""Planted bugs are found: the machine and the lists would find them in the sources too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coroutine_machine import SOURCES, Machine
from faults import FAULTS, Fault
from lists import KERNELS
from tables import each

LISTS = 200
FIRST = {fault.kernel: fault for fault in reversed(FAULTS)}  # one of each kernel among the quick


def assert_found(fault: Fault, machine: Callable[..., Machine]) -> None:
    played = machine(fault.architecture, (fault.edit,))
    for number in range(LISTS):
        try:
            KERNELS[fault.kernel](played, number)
        except AssertionError as error:
            if fault.said not in str(error):
                raise AssertionError(f"{fault.name} was found otherwise: {error}") from error
            return
    raise AssertionError(f"{fault.name} was not found in {LISTS} lists")


@each("kernel", KERNELS)
def test_a_planted_bug_is_found(kernel: str, machine: Callable[..., Machine]) -> None:
    assert_found(FIRST[kernel], machine)


@pytest.mark.slow
@each("fault", FAULTS)
def test_every_planted_bug_is_found(fault: Fault, machine: Callable[..., Machine]) -> None:
    assert_found(fault, machine)


def test_each_bug_changes_one_place() -> None:
    assert len(FAULTS) >= 12 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert (SOURCES / fault.edit.source).read_text().count(fault.edit.old) == 1, fault.name
