"""`zk.Delayed` where some of the state stays on the device: what is pending there is as whole as on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import SCHEDULES, Row, on_device, optimizer_of
from optim_cases import same_bits
from played_cases import SLOW, played, the_same
from tables import each
from torch import nn
from worlds import World

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim.beside import Beside
from zerokern.planner.footprint import staying_numel
from zerokern.planner.forecast import step_program
from zerokern.schedule import machine_of, simulate
from zerokern.schedule.recorder import Recorder

BUDGETS = ["device:24KiB", "cpu:8KiB", "disk"]


def begun(device: PlayedDevice, row: Row, where: Any, schedule: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = row.model(World(0, 1), seed)
    on_device(device, row, model)
    return model, optimizer_of(row, model, tier=where, schedule=schedule)


def staying(opt: Any) -> list[Any]:
    return [copy for copy in opt.holdings.host.copies.values() if copy.stays is not None]


@each("kept", [True, False])
@each("schedule", ["delayed", "delayed after 2"])
def test_gradients_are_read_before_the_program_overwrites_them(schedule: str, kept: bool, devices: Callable) -> None:
    """Kept ones are zeroed in place and added to while the device is far behind; not all steps are carried out."""
    slow = devices(**SLOW["compute"])
    settings = {"accumulate": 2, "keep_gradients": kept, "broken": (3, 4), "dtype": torch.bfloat16, "steps": 8}
    the_same(*played(slow, SCHEDULES[schedule], tier=["device:100KiB", "cpu"], **settings))


def test_a_parameter_that_is_written_drops_its_pending_update(device: PlayedDevice) -> None:
    """Whether it stays on the device or not; `flush()` before keeps it."""
    for flushes in (False, True):
        weights = [device.own(nn.Parameter(torch.full((64, 64), 2.0))) for _ in range(3)]
        opt = zk.SGD(weights, lr=1.0, momentum=0.9, tier=["device:20KB", "cpu"], schedule=zk.Delayed(after=0))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        opt.step()
        assert len(staying(opt)) == 1
        device.synchronize()
        assert all(weight.eq(2.0).all() for weight in weights), "nothing has changed visibly"
        if flushes:
            opt.flush()
            device.synchronize()
            assert all(weight.eq(1.0).all() for weight in weights)
        with torch.no_grad():
            weights[0].fill_(5.0)
            weights[2].fill_(7.0)
        if flushes:
            opt.flush()
        else:
            with pytest.warns(UserWarning, match="^2 parameters were written while an update of them was pending"):
                opt.flush()
        device.synchronize()
        assert [weight[0, 0].item() for weight in weights] == [5.0, 1.0, 7.0]
        opt.close()


def test_pending_values_on_the_device_are_refused_where_nobody_delays(device: PlayedDevice) -> None:
    weight = device.own(nn.Parameter(torch.ones(64)))
    opt = zk.AdamW([weight], lr=0.1, tier=["device:1MB", "cpu"], schedule=zk.Delayed())
    weight.grad = torch.ones(64)
    opt.step()
    device.synchronize()  # what state_dict() reads there was made in the order of its stream
    other = zk.AdamW([weight], lr=0.1, tier=["device:1MB", "cpu"], schedule="overlap")
    with pytest.raises(StateError, match=r"pending.*flush"):
        other.load_state_dict(opt.state_dict())
    assert not other.state


def test_a_frozen_parameter_that_stays_is_trained_again(device: PlayedDevice) -> None:
    def life(where: Any, own: Callable) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [own(nn.Parameter(torch.randn(40, 30).bfloat16())) for _ in range(4)]
        groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.3}]
        opt = zk.AdamW(groups, lr=0.1, tier=where, schedule=zk.Delayed(after=1), max_grad_norm=1.0)
        for step in range(8):
            for number, weight in enumerate(weights):
                weight.requires_grad_(step not in (2, 3) or number != 0)
                weight.grad = torch.full_like(weight, 1.0 + number + step) if weight.requires_grad else None
            if step == 5:  # another in the place of one that stays
                device.synchronize()
                before, weights[1] = weights[1], own(nn.Parameter(weights[1].detach().clone() + 1))
                opt.param_groups[0]["params"] = weights[:2]
                weights[1].grad = before.grad
                opt.state.pop(before, None)
            opt.step()
            device.synchronize()
        opt.flush()
        device.synchronize()
        return [weight.detach().clone() for weight in weights]

    expected = life("cpu", lambda weight: weight)
    assert same_bits(life(["device:25KB", "cpu"], device.own), expected)
    assert same_bits(life(["device:10MB", "cpu"], device.own), expected)


def test_a_step_that_finds_no_room_for_shadows_can_be_made_again(
    device: PlayedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [device.own(nn.Parameter(torch.full((64, 64), 2.0))) for _ in range(3)]
    opt = zk.SGD(weights, lr=1.0, momentum=0.9, tier=["device:40KB", "cpu"], schedule=zk.Delayed(after=5))
    made, empty_like, left = [], torch.empty_like, [1]

    def scarce(*given: Any, **settings: Any) -> torch.Tensor:
        if not left[0]:
            raise torch.OutOfMemoryError("there")
        left[0] -= 1
        made.append(given)
        return empty_like(*given, **settings)

    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", scarce)
        with pytest.raises(torch.OutOfMemoryError, match="there"):
            opt.step()
    assert made
    opt.step()
    device.synchronize()
    assert all(weight.eq(1.0).all() for weight in weights)


def test_a_predicted_step_falls_with_the_budget() -> None:
    """What stays is read and written once more on the device, where it is put in place."""
    found: list[list[float]] = []
    for budget in (0, 2, 5, 8):
        plan = zk.plan("1B", tier=[f"device:{budget}GB", "cpu"] if budget else "cpu", schedule=zk.Delayed(), stage=2)
        programs = {name: step_program(plan, name, 2048) for name in ("overlap", "delayed")}
        there = {
            name: sum(op.nbytes for op in one.ops if op.what.endswith("on the device"))
            for name, one in programs.items()
        }
        assert there["delayed"] - there["overlap"] == 2 * staying_numel(plan) == 2 * budget * 10**8
        assert plan.roles["shadow"] == 2 * plan.numel
        found.append([simulate(one, machine_of("h100-pcie"), steps=1).step_seconds for one in programs.values()])
    assert all(delayed <= overlap for overlap, delayed in found)
    assert [one for _, one in found] == sorted((one for _, one in found), reverse=True)


@pytest.mark.parametrize("schedule", ["overlap", "delayed"])
def test_what_stays_is_updated_before_the_copies_of_what_does_not(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm takes squares alone, which come beside gradients on a link that is slow."""
    numel, launched = 1 << 17, []
    launch = Beside.launch

    def told(self: Beside, scale: float) -> None:
        launched.append(time.perf_counter_ns())
        launch(self, scale)

    monkeypatch.setattr(Beside, "launch", told)
    device, recorder = PlayedDevice(down_gb_s=0.004), Recorder()
    training = PlayedTraining(device, (numel, numel, numel), dtype=torch.bfloat16, recorder=recorder)
    tier = [f"device:{10 * numel}B", "cpu"]
    optimizer = zk.AdamW(training.parameters, tier=tier, schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    optimizer.holdings.recorder = recorder
    training.train(optimizer, 4)
    optimizer.flush()
    training.synchronize()
    device.close()
    for step in (2, 3, 4):  # the first one makes state
        copies = [event for event in recorder.events if event.step == step and event.verb == "Fetch"]
        assert copies and launched[step - 1] < min(copy.end_ns for copy in copies)
