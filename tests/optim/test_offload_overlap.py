"""tier="cpu": sync has the bits of the device's, overlap those of sync, over 200 steps, wherever parameters live."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from offload_cases import DTYPES, LIMITS, Row, Trace, agree, optimizer_of, rarely, train
from optim_cases import EVERY_STATE, MASTERS
from products import where_they_meet
from worlds import World, alone, anywhere, on_ranks, ranked

CLIPS = ("never", "random", "often")
SIZES = (1, 2, 3, 4)
PLACES = ("plain", "stage 0", "stage 1", "stage 2", "stage 3")
MEANT = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def trained(world: World, row: Row, **settings: Any) -> Trace:
    model = row.model(world)
    return train(world, row, model, optimizer_of(row, model, **settings))


def compare(world: World, row: Row, alike: Sequence[str] = ("sync", "overlap")) -> None:
    """The first of the schedules, or the tier of the device, and the others: the same bits."""
    runs = [trained(world, row, tier="cpu", schedule=schedule) for schedule in alike if schedule != "device"]
    if "device" in alike:
        runs.append(trained(world, row, tier="device"))
    for run in runs[1:]:
        agree(run, runs[0])


def product(places: Iterable[str] = PLACES, sizes: Iterable[int] = SIZES) -> list[tuple[int, Row]]:
    listed = itertools.product(sizes, places, DTYPES, CLIPS, (1, 4))
    return [
        (size, Row(wrap, dtype, clip, accumulate))
        for size, wrap, dtype, clip, accumulate in listed
        if (wrap, dtype) != ("plain", "mixed")
    ]


def pairwise(cases: Sequence[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """A few of the cases in which any two of their settings meet, with few ranks and short accumulation if possible."""
    return where_they_meet(sorted(cases, key=lambda case: case[0] * case[1].accumulate), 2)


def shown(cases: Iterable[tuple[int, Row]], **settings: Any) -> list:
    return [pytest.param(size, row, id=f"{size} ranks: {row}", **settings) for size, row in cases]


CHOSEN = pairwise(product())
# Threads that play ranks share one interpreter: the more of them, the fewer steps in the quick run.
QUICK = {1: 40, 2: 8, 3: 6, 4: 6}
LONG = where_they_meet(product(sizes=(1, 2)), 3) + [case for case in CHOSEN if case[0] > 2]


@pytest.mark.parametrize("size, row", shown((size, replace(row, steps=QUICK[size])) for size, row in CHOSEN))
def test_overlap_has_the_bits_of_sync(size: int, row: Row) -> None:
    anywhere(size, compare, row)


@pytest.mark.slow
@pytest.mark.parametrize("size, row", shown(LONG))
def test_overlap_has_the_bits_of_sync_over_200_backward_passes(size: int, row: Row) -> None:
    anywhere(size, compare, replace(row, steps=200 // row.accumulate))


@ranked
def compare_all(world: World, rows: Sequence[Row]) -> None:
    for row in rows:
        compare(world, row)


def test_overlap_has_the_bits_of_sync_on_real_ranks() -> None:
    rows = [
        Row("fsdp2", "mixed", "random", accumulate=4, steps=6),
        Row("stage 2", "bf16", "random", steps=20),
        Row("stage 3", "mixed", "random", accumulate=4, steps=6),
    ]
    on_ranks(2, compare_all, rows, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_has_the_bits_of_sync_on_real_ranks_over_many_steps(size: int) -> None:
    rows = [row for ranks, row in pairwise(product(["fsdp2", "stage 3"])) if ranks == size]
    on_ranks(size, compare_all, [replace(row, steps=60 // row.accumulate) for row in rows], timeout=600)


@pytest.mark.parametrize("wrap", ["stage 3", *rarely("plain")])
@pytest.mark.parametrize("name, state_format", EVERY_STATE)
def test_every_optimizer_and_state_format_at_every_schedule(name: str, state_format: str, wrap: str) -> None:
    formats = (("state_format", state_format),)
    alone(compare, Row(wrap, "bf16", "random", name=name, formats=formats, steps=8), ("device", "sync", "overlap"))


@pytest.mark.parametrize("dtype, master_format", MASTERS, ids=str)
def test_every_master_format_at_every_schedule(dtype: Any, master_format: str | None) -> None:
    name = next(name for name, meant in MEANT.items() if meant == str(dtype))
    formats = (("master_format", master_format),)
    alone(compare, Row("plain", name, "random", formats=formats, steps=8), ("device", "sync", "overlap"))


@pytest.mark.parametrize(
    "row", [Row("plain", "fp32", "none", 4), Row("plain", "bf16"), Row("stage 2", "mixed")], ids=str
)
def test_sync_on_the_host_has_the_bits_of_the_device(row: Row) -> None:
    alone(compare, replace(row, steps=60), ("device", "sync"))


@pytest.mark.parametrize("wrap", ["plain", "stage 3", *rarely("stage 1")])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("size", [2, *rarely(1)])
def test_steps_that_are_skipped(size: int, wrap: str, scaled: bool) -> None:
    row = Row(wrap, "bf16", "random", scaled=scaled, broken=(0, 1, 5, 9), steps=14)
    anywhere(size, compare, row, ("device", "sync", "overlap"))


def test_the_rows_are_worth_comparing() -> None:
    """There are few of them, and limits clip as often as their names say."""
    assert len(CHOSEN) <= 26
    norms = trained(World(0, 1), Row(clip="never"), tier="device").norms
    clipped = {clip: sum(norm > LIMITS[clip] for norm in norms) for clip in CLIPS}
    assert clipped["never"] == 0 and 40 < clipped["random"] < 160 and clipped["often"] > 180, clipped
