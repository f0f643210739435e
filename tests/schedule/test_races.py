"""Each overlap with its racing side stretched gives the bits of the plain loop; without the dependency that protects
it, it does not. So the played device would have shown a race, if there were one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from program_cases import same, trained, without
from tables import each
from tries import Missed, in_time

from zerokern.examples.played_device import PlayedDevice
from zerokern.schedule.policies import Delayed

STEPS = 5
SCHEDULES = ("sync", "overlap", Delayed())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_same_bits_with_all_slow_and_gradients_in_the_same_memory(schedule: Any) -> None:
    """The next backward may not write a gradient that is still on its way."""
    for options, settings in (
        ({}, {"stretch": 0.002}),
        ({"keep_gradients": True}, {"stretch": {"down": 0.008}, "seed": 3}),
    ):
        device = PlayedDevice(poison=True, **settings)
        found, expected = trained(schedule, STEPS, device, slow_cpu=0.003, **options)
        device.close()
        assert same(found, expected), options


# what is left out, and what has to be slow for it to show
NEEDED = [
    ("overlap", "Fetch", "Backward", "user"),
    ("overlap", "Norm", "Fetch", "down"),
    ("overlap", "Store", "Step", "cpu"),
    ("overlap", "Publish", "Store", "up"),
    ("sync", "Norm", "Fetch", "down"),
    ("sync", "Store", "Step", "cpu"),
    ("sync", "Publish", "Store", "up"),
    (Delayed(), "Fetch", "Backward", "user"),
    (Delayed(), "Fetch", "Step", "cpu"),
    (Delayed(), "Norm", "Fetch", "down"),
    (Delayed(), "Store", "Step", "cpu"),
    (Delayed(), "Step", "Store", "up"),
    (Delayed(), "Store", "Publish", "compute"),
    (Delayed(), "Publish", "Store", "up"),
]
HARD: dict[str, dict[str, Any]] = {
    "compute": {"stretch": {"compute": 0.006}}, "down": {"stretch": {"down": 0.02}}, "up": {"stretch": {"up": 0.02}},
    "cpu": {}, "user": {},
}  # fmt: skip


@each("schedule, verb, before, slow", NEEDED)
def test_each_dependency_is_needed(schedule: object, verb: str, before: str, slow: str) -> None:
    def race(slower: float) -> None:
        device = PlayedDevice(poison=True, **HARD[slow])
        try:
            cpu, user = (slower if slow == who else 0.0 for who in ("cpu", "user"))
            changed = partial(without, verb=verb, before=before)
            found, expected = trained(schedule, STEPS, device, changed, cpu, user)
        except (KeyError, RuntimeError):
            return
        finally:
            device.close()
        if same(found, expected):
            raise Missed(f"{verb} without {before} before it gives the same bits all the same")

    in_time(race, 0.008)
