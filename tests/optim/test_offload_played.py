"""tier="cpu" on a device that is played: whatever is slow, each schedule has the bits that it promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    Row,
)
from optim_cases import MAKERS
from played_cases import SLOW, SLOW_S, UNITS, compare, halve, played, the_same
from tables import each
from tries import Missed, in_time
from worlds import World, alone, on_ranks, on_threads, ranked

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory.copies import Copy

NAMES = ["overlap", "delayed"]


@each("slow", ["compute", "copies down", "copies up", "everything"])
@each("schedule", NAMES)
def test_whatever_is_slow(schedule: str, slow: str, devices: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything is, the memory of the library is poisoned, too."""
    monkeypatch.setenv("ZEROKERN_POISON", str(int(slow == "everything")))
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], dtype=torch.bfloat16))


def unordered_fetches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copy, "wait", lambda self: None)


def test_a_race_that_is_lost_shows(devices: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    unordered_fetches(monkeypatch)

    def race(slower: float) -> None:
        try:
            ours, expected = played(devices(stretch={"down": slower}), "sync", steps=6, before_step=halve)
        except ValueError:  # the root of ruins that were read as a sum of squares
            return
        if ours[0] == expected[0]:
            raise Missed("the race was won")

    in_time(race, 0.01)


@each("schedule", NAMES)
def test_gradients_do_not_leave_over_those_that_a_slow_update_reads(schedule: str, slow_cpu: None) -> None:
    """Under zk.shard, where they leave during backward: beside the update of the step before."""
    alone(compare, Row("stage 2", "bf16", "none", steps=8), SCHEDULES[schedule])


@each("schedule", NAMES)
def test_a_bucket_of_which_a_rank_has_nothing(schedule: str) -> None:
    on_threads(2, compare, Row("stage 1", "fp32", accumulate=2, steps=6), SCHEDULES[schedule])


@ranked
def fsdp2_on_devices(world: World) -> None:
    for schedule in ("overlap", "delayed after 2"):
        compare(world, Row("fsdp2", "bf16", "random", accumulate=2, steps=4), SCHEDULES[schedule])


def test_fsdp2_on_devices_of_real_ranks() -> None:
    on_ranks(2, fsdp2_on_devices)


def test_a_device_that_fails_is_heard_of_and_nothing_hangs() -> None:
    slow = PlayedDevice(stretch={"down": SLOW_S})
    training = PlayedTraining(slow, UNITS)
    optimizer = MAKERS["adamw"](training.parameters, tier="cpu", schedule=zk.Delayed(), max_grad_norm=1.0)
    training.train(optimizer, 2)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    slow.launch(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        training.train(optimizer, 3)
    with pytest.raises(RuntimeError, match="the device is gone"):
        slow.close()
