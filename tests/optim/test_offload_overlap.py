"""tier="cpu", schedule="overlap" beside what tests/whole shows: the bits of sync, and of state on the device."""

from __future__ import annotations

from typing import Any

from offload_cases import Row, Trace, agree, optimizer_of, train
from worlds import World, alone, on_threads


def trained(world: World, row: Row, **settings: Any) -> Trace:
    model = row.model(world)
    return train(world, row, model, optimizer_of(row, model, **settings))


def compare(world: World, row: Row) -> None:
    expected = trained(world, row, tier="device")
    for schedule in ("sync", "overlap"):
        agree(trained(world, row, tier="cpu", schedule=schedule), expected)


def test_overlap_has_the_bits_of_sync(slow_cpu: None) -> None:
    """Each part of an update is late, so that a forward that does not wait for it is too early."""
    alone(compare, Row("stage 3", "mixed", "never", accumulate=4, steps=12))


def test_steps_that_are_skipped() -> None:
    """The first ones, before there is any state, and later ones."""
    for wrap, scaled in (("plain", True), ("stage 3", False)):
        row = Row(wrap, "bf16", "random", scaled=scaled, broken=(0, 1, 5, 7), steps=9)
        on_threads(2, compare, row)
