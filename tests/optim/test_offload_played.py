"""tier="cpu" on a device that is played: whatever is slow, each schedule has the bits that it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    ByHand,
    Late,
    Row,
    agree,
    exact_calls,
    local,
    on_device,
    optimizer_of,
    train,
)
from optim_cases import MAKERS, copies, same_bits
from tables import each
from tries import Missed, in_time
from waiting_device import HostComputes
from worlds import World, alone, on_ranks, on_threads, ranked

import zerokern as zk
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory.copies import Copy

UNITS = (3000, (700, 1, 130), 5000, (64, 64))
STEPS = 10
SLOW_S = 0.002
NAMES = ["overlap", "delayed"]
# What is prolonged at random, so that what runs beside it is ahead.
SLOW = {
    "nothing": {},
    "compute": {"stretch": {"compute": SLOW_S}},
    "copies down": {"stretch": {"down": SLOW_S}},
    "copies up": {"stretch": {"up": SLOW_S}},
    "everything": {"stretch": SLOW_S, "seed": 7, "latency_us": 50.0},
    "the link": {"down_gb_s": 0.02, "up_gb_s": 0.01},
}


def played(
    device: PlayedDevice,
    schedule: Any,
    *,
    accumulate: int = 1,
    steps: int = STEPS,
    before_step: Callable[[Any], object] = lambda optimizer: None,
    settings: dict[str, Any] | None = None,
    tier: Any = "cpu",
    **training: Any,
) -> tuple[Any, Any]:
    """Losses, norms and values of a training on the device, and of the loop by hand without one."""
    clipped = {"max_grad_norm": 70.0, "lr": 1e-2, **(settings or {})}
    ours = PlayedTraining(device, UNITS, **training)
    plain = ours.reference()
    ahead = copies(plain.parameters)
    late = Late(plain.parameters, ahead, MAKERS["adamw"](ahead, **clipped), exact_calls(schedule))
    optimizer = MAKERS["adamw"](ours.parameters, tier=tier, schedule=schedule, **clipped)
    found = []
    for one, loop, inner in ((plain, late, late.optimizer), (ours, optimizer, optimizer)):
        norms: list[float] = []

        def scheduled(step: int, inner: Any = inner, norms: list = norms, one: Any = one) -> None:
            norms.append(inner.grad_norm)
            inner.param_groups[0]["lr"] = 1e-2 * (1 + step % 5) / 5
            before_step(one)

        one.train(loop, steps, accumulate=accumulate, before_step=scheduled)
        found.append((one.losses(), repr(norms), inner.skipped_steps, one.values()))
        loop.flush()
        found[-1] += (one.values(),)
    return found[1], found[0]


def the_same(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0], "losses"
    assert ours[1:3] == expected[1:3], "norms, and what was skipped"
    assert same_bits(ours[3], expected[3]), "what is seen at the end"
    assert same_bits(ours[4], expected[4]), "what flush() publishes"


@each("slow", ["compute", "copies down", "copies up"])
@each("schedule", NAMES)
def test_whatever_is_slow(schedule: str, slow: str, devices: Callable) -> None:
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], dtype=torch.bfloat16))


@pytest.mark.slow
@each("slow", ["nothing", "everything", "the link"])
@each("schedule", SCHEDULES)
def test_whatever_else_is_slow(schedule: str, slow: str, devices: Callable) -> None:
    settings = {"forward_seconds": 0.0003, "backward_seconds": 0.0005, "steps": 30, "broken": (5, 20, 21)}
    accumulate = 4 if slow == "nothing" else 1
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], accumulate=accumulate, **settings))


@each("kept", [True, False])
@each("schedule", NAMES)
def test_accumulated_kept_and_broken_gradients(schedule: str, kept: bool, devices: Callable) -> None:
    slow = devices(stretch={"down": SLOW_S, "compute": SLOW_S / 4})
    the_same(
        *played(
            slow,
            SCHEDULES[schedule],
            accumulate=3,
            steps=8,
            keep_gradients=kept,
            broken=(4, 9, 10),
            dtype=torch.bfloat16,
        )
    )


def halve(training: PlayedTraining, *, counted: bool = True) -> None:
    """Some gradients, on the device; they may be on their way already. Not every edit is counted as a version."""
    for param in training.parameters[1:3]:
        assert param.grad is not None
        if counted:
            torch.autograd.graph.increment_version(param.grad)
        training._launch(partial(param.grad.data.mul_, 0.5))


@each("kept", [True, False])
@each("schedule", NAMES)
def test_edits_that_nobody_counts(kept: bool, schedule: str, devices: Callable) -> None:
    """Plain gradients are read at step()."""
    edits = {"before_step": partial(halve, counted=False), "keep_gradients": kept, "steps": 8}
    the_same(*played(devices(**SLOW["copies down"]), SCHEDULES[schedule], **edits))


@each("schedule", NAMES)
def test_a_slow_cpu(schedule: str, slow_cpu: None, devices: Callable) -> None:
    the_same(*played(devices(), SCHEDULES[schedule], dtype=torch.bfloat16, steps=8))


@each("schedule", NAMES)
def test_poisoned_memory(schedule: str, devices: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_POISON", "1")
    the_same(*played(devices(**SLOW["everything"]), SCHEDULES[schedule], dtype=torch.bfloat16, steps=8, broken=(3,)))


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


def compare(world: World, row: Row, schedule: Any, tiers: Sequence[Any] | None = None) -> None:
    """A model that autograd trains: what it reads in its forward is there, and nothing else is waited for."""
    device = HostComputes(stretch=SLOW_S, poison=True)
    hand = ByHand(row, world, exact_calls(schedule))
    expected = train(world, row, hand.model, hand)
    model = row.model(world)
    on_device(device, row, model)
    ours = optimizer_of(row, model, tier="cpu" if tiers is None else tiers[world.rank], schedule=schedule)
    wait = lambda step: device.synchronize()  # noqa: E731
    agree(train(world, row, model, ours, between=wait), expected, ahead=True)
    ours.flush()
    device.synchronize()
    hand.flush()
    assert same_bits(*([local(param) for param in one.parameters()] for one in (model, hand.model)))
    device.close()


ROWS = [
    ("overlap", Row("stage 2", "bf16", "random", broken=(3,))),
    ("delayed", Row("plain", "fp32", "random", scaled=True, broken=(2, 7))),
    ("delayed", Row("plain", "bf16", "random", accumulate=4, broken=(2, 7))),
]


@each("schedule, row", ROWS)
def test_models_that_autograd_trains(schedule: str, row: Row) -> None:
    alone(compare, replace(row, steps=8), SCHEDULES[schedule])


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
