"""Whole programs, of which any two settings meet in a quick one, any three in one of the others: the expected bits."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lane import is_drawn
from programs import FACTORS, WHOLE, Program, Training, delays_on_disk, follow, programs, small_rings
from tables import each
from worlds import World, alone, on_hybrid_threads, on_ranks, on_threads, ranked

A_LAUNCH = 12  # programs that processes run one after another
RUNS: dict[str, Any] = {
    "alone": alone,
    "threads": lambda *given: on_threads(2, *given),
    "hybrid": lambda *given: on_hybrid_threads(2, 2, *given),
}
QUICK = programs(2)


def rows(slow: bool, config: pytest.Config) -> list[Program]:
    return [one for one in programs(3) if one not in QUICK and is_drawn(str(one), config, 0.25)] if slow else QUICK


def here(slow: bool, config: pytest.Config) -> list:
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(one, id=str(one), marks=marks) for one in rows(slow, config) if one.where != "ranks"]


def in_launches(slow: bool, config: pytest.Config) -> list:
    marks = [pytest.mark.slow] if slow else []
    found = [one for one in rows(slow, config) if one.where == "ranks"]
    return [
        pytest.param(found[begin : begin + A_LAUNCH], id=f"{'slow' if slow else 'quick'} {begin}", marks=marks)
        for begin in range(0, len(found), A_LAUNCH)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    lanes = (False, True) if metafunc.config.slow_rows else (False,)  # type: ignore[attr-defined]
    for name, made in (("program", here), ("launch", in_launches)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [one for slow in lanes for one in made(slow, metafunc.config)])


def test_the_expected_bits(program: Program, tmp_path: Path) -> None:
    RUNS[program.where](follow, program, tmp_path)


@ranked
def refused(world: World, program: Program, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^schedule=Delayed\(.*\): must be 'sync' or 'overlap' for parameters"):
        Training(world, program, folder)
    assert not list(folder.glob("state-*/*")), "the optimizer has opened no disk"


@each("schedule", ["delayed", "delayed after 2"])
@each("rule", FACTORS["rule"])
def test_what_is_ruled_out_is_refused(rule: str, schedule: str, tmp_path: Path) -> None:
    """Of any rule, on all ranks alike."""
    given = next(one for one in QUICK if one.params == "nvme" and one.where == "threads" and one.rule not in WHOLE)
    program = replace(given, rule=rule, schedule=schedule, tier="nvme", update=None, state_format="fp32")
    assert delays_on_disk(program.params, program.schedule)
    RUNS["threads"](refused, program, tmp_path)


@ranked
def follow_all(world: World, launched: Sequence[Program], folder: Path) -> tuple[int, str]:
    """How many programs went well, and what went wrong in the one that did not."""
    with pytest.MonkeyPatch.context() as patch:
        small_rings(patch)
        for number, program in enumerate(launched):
            try:
                follow(world, program, folder / str(number))
            except Exception:
                return number, f"{program}\n{traceback.format_exc()}"  # ranks may be in different places now
    return len(launched), ""


def test_the_expected_bits_on_real_ranks(launch: Sequence[Program], tmp_path: Path) -> None:
    """What comes after a program that fails has a launch of its own."""
    failures, left = [], launch
    while left:
        folder = tmp_path / str(len(left))
        folder.mkdir()
        said = on_ranks(2, follow_all, left, folder)
        failures += [one for _, one in said if one]
        left = left[min(number for number, _ in said) + 1 :]
    assert not failures, "\n".join(failures)
