"""The norm of gradients that leave a device: measured there, with the bits of a pass over them in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, Row, Small, on_device, one_thread, optimizer_of, values
from optim_cases import MAKERS, same_bits
from played_cases import counted, played, the_same
from tables import each
from torch import Tensor, nn
from waiting_device import HostComputes
from waiting_device import played as waiting
from worlds import World, alone, built, on_threads, ranked
from zero_cases import mse

from zerokern.examples.played_device import PlayedDevice, PlayedMark
from zerokern.kernels import squares as kernel_squares

NAMES = ["sync", "overlap", "delayed"]


@each("kept", [True, False])
@each("schedule", NAMES)
def test_plain_gradients_are_read_on_the_device_alone(schedule: str, kept: bool, devices: Callable) -> None:
    """And the norms are bit for bit those of a pass over host memory."""
    slow = devices(stretch={"down": 0.001})
    with counted() as reads:
        ours, expected = played(slow, SCHEDULES[schedule], steps=6, keep_gradients=kept, accumulate=2)
    the_same(ours, expected)
    numel = sum(value.numel() for value in ours[3])
    assert reads.by_device == 6 * numel, "each gradient once a step"
    assert reads.by_host == 6 * numel, "those of the training without a device"


def test_without_a_norm_nothing_is_measured(devices: Callable) -> None:
    with counted() as reads:
        played(devices(), "overlap", steps=3, settings={"max_grad_norm": None})
    assert reads.by_device == reads.by_host == 0


def test_the_norm_is_of_what_has_a_gradient() -> None:
    """Of parameters of which another one has none in each step: squares are those of their own gradients."""
    numels = (300, 500, 700)
    with waiting() as device:
        weights = [device.own(nn.Parameter(torch.ones(numel))) for numel in numels]
        opt = MAKERS["adamw"](weights, tier="cpu", max_grad_norm=1.0)
        for idle in (3, 0, 1, 2):
            for number, weight in enumerate(weights):
                weight.grad = None if number == idle else device.own(torch.full_like(weight, 1.0 + number))
            opt.step()
            squares = [numel * (1 + number) ** 2 for number, numel in enumerate(numels) if number != idle]
            assert opt.grad_norm == math.sqrt(sum(squares)), idle
        device.synchronize()
        opt.close()


def scaled(grad: Any) -> None:
    grad.mul_(3.0)


def scaled_unseen(grad: Any) -> None:
    grad.local.data.mul_(3.0)


def spoilt(grad: Any) -> None:
    grad.fill_(math.nan)


EDITS: dict[str, Callable[[Any], None]] = {one.__name__: one for one in (scaled, scaled_unseen, spoilt)}


def loop(world: World, row: Row, edit: str, device: Any, **settings: Any) -> tuple[str, int, list[Tensor]]:
    """Norms, skipped steps and values of a training in which some gradients are written after they were reduced."""
    model = row.model(world)
    if device is not None:
        on_device(device, row, model)
    optimizer = optimizer_of(row, model, **settings)
    norms: list[float | None] = []
    with one_thread():
        for step in range(5):
            for micro in range(row.accumulate):
                mse(model, 7 * step + micro, world).backward()
            if edit and step in (1, 3):
                for param in (model.blocks[0].up.weight, model.leave.bias):
                    EDITS[edit](param.grad)
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
            if device is not None:
                device.synchronize()
    optimizer.flush()
    return repr(norms), optimizer.skipped_steps, values(model)


class MeasuresLate(HostComputes):
    """Squares are measured behind what the host goes on with: a copy of them has to follow that."""

    def launch(self, *work: Any, **settings: Any) -> PlayedMark:
        measures = getattr(getattr(work[0], "func", None), "__name__", "") == "measure"
        return (PlayedDevice if measures else HostComputes).launch(self, *work, **settings)


def compare(world: World, row: Row, schedule: Any, edit: str, counts: bool) -> None:
    expected = loop(world, row, edit, None)
    device = MeasuresLate(stretch={"compute": 0.002, "down": 0.0005, "up": 0.0005}, poison=True)
    with counted() if counts else nullcontext() as reads:
        found = loop(world, row, edit, device, tier="cpu", schedule=schedule)
    device.close()
    assert found[:2] == expected[:2], "norms, and what was skipped"
    if schedule != SCHEDULES["delayed"]:  # which trains on other values
        assert same_bits(found[2], expected[2])
    if reads is not None:
        assert reads.by_host == 0 and reads.by_device >= 5 * sum(value.numel() for value in found[2])


@each("edit", ["", *EDITS])
@each("wrap", ["stage 1", "stage 2", "stage 3"])
@each("schedule", ["sync", "overlap"])
def test_shards_that_leave_during_backward_are_measured_where_they_were_reduced(
    schedule: str, wrap: str, edit: str
) -> None:
    """Written afterwards, seen or unseen: the norm is of what the update reads, and the device measures that again."""
    alone(compare, Row(wrap, "fp32", "random", accumulate=2), SCHEDULES[schedule], edit, True)


def test_of_two_ranks_each_measures_its_own() -> None:
    on_threads(2, compare, Row("stage 2", "fp32", "random"), "overlap", "scaled", False)


def resting(world: World, device: Any, edit: str, accumulate: int) -> tuple[str, int]:
    """Norms of a training whose parameters and gradients rest in host memory, and are reduced on the device."""
    model = built(Small)
    if device is not None:
        for param in model.parameters():
            device.own(param)
    world.shard(model, stage=3, tier="device" if device is None else "cpu", bucket_bytes=2000)
    optimizer = MAKERS["adamw"](model.parameters(), max_grad_norm=0.7, tier="device" if device is None else "cpu")
    norms: list[float | None] = []
    with one_thread():
        for step in range(4):
            for micro in range(accumulate):
                mse(model, 7 * step + micro, world).backward()
            if edit and step in (1, 2):
                EDITS[edit](model.blocks[0].up.weight.grad)
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
    return repr(norms), optimizer.skipped_steps


@each("accumulate", [1, 3])
@each("edit", ["", *EDITS])
def test_gradients_that_rest_in_host_memory_come_there_with_their_squares(edit: str, accumulate: int) -> None:
    """What is accumulated is added on the device, and measured again there: once for each reduction."""
    world = World(0, 1)
    expected = resting(world, None, edit, accumulate)
    with counted() as reads, waiting(down_gb_s=1.0, stretch=5e-4, poison=True) as device:
        assert resting(world, device, edit, accumulate) == expected
    numel = sum(param.numel() for param in Small().parameters())
    assert reads.by_device >= 4 * accumulate * numel
    edited = {"": 0, "scaled": 2, "scaled_unseen": 2, "spoilt": 2}[edit]
    weight = Small().blocks[0].up.weight.numel()
    # what was written in host memory is measured there; if nobody can tell what was, all of its bucket
    assert reads.by_host == 0 if not edit else edited * weight <= reads.by_host <= edited * 2000


@ranked
def rests_on_ranks(world: World) -> None:
    expected = resting(world, None, "scaled", 2)
    with waiting(down_gb_s=1.0, stretch=5e-4, poison=True) as device:
        assert resting(world, device, "scaled", 2) == expected


def test_gradients_of_ranks_that_rest_in_host_memory() -> None:
    on_threads(2, rests_on_ranks)


def test_a_launch_that_fails_is_heard_of_where_the_norm_is_asked_for(
    devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing has changed by then."""
    device = devices()
    weight = nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    device.own(weight), device.own(weight.grad)
    optimizer = MAKERS["sgd"]([weight], tier="cpu", max_grad_norm=1.0)

    def fail(self: Any, tensors: Any, out: Tensor) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(kernel_squares.ChunkSums, "measure", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step()
    assert weight.eq(1.0).all() and not optimizer.state_dict()["state"]
    with pytest.raises(RuntimeError, match="on purpose"):  # the played device has failed for good
        device.close()
    device._state.failure = None
