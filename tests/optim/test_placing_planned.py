"""What stays on a device beside state elsewhere: bytes as planned, and copies that wait for none of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nvme_cases import Tier
from offload_cases import SCHEDULES, Row, on_device
from optim_cases import same_bits
from tables import each
from test_placing import Counting
from torch import nn
from worlds import World, alone

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels.cpu import StepTable


def as_planned(world: World, stage: int, budgets: list[str], schedule: str, disk: Any) -> None:
    device, model = Counting(), nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)]).to(torch.bfloat16)
    words = ["nvme" if one == "disk" else one for one in budgets]
    plan = zk.plan(model, stage=stage, tier=words, schedule=SCHEDULES[schedule], device="cuda")
    if stage:
        zk.shard(model, stage=stage, bucket_bytes=1 << 13)
    on_device(device, Row(f"stage {stage}" if stage else "plain"), model)
    tiers = [disk if one == "disk" else one for one in budgets]
    opt = zk.AdamW(model.parameters(), tier=tiers, schedule=SCHEDULES[schedule], max_grad_norm=1.0)
    for _ in range(2):
        device.synchronize()
        device.moved.clear()  # copies were made in the first step
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        opt.step()
        opt.flush()
        opt.zero_grad()
    device.synchronize()
    assert {lane: device.moved.get(lane, 0) for lane in ("down", "up")} == {
        "down": plan.moved("down"),
        "up": plan.moved("up"),
    }
    assert opt.statistics()["state_bytes/disk"] == plan.tiers.get("nvme", 0)
    staying = sum(copy.stays or 0 for copy in opt.holdings.host.copies.values())
    assert staying == sum(nbytes for one in plan.placed if one.tier == "device" for _, nbytes in one.tensors) > 0
    device.close()


@each("stage, budgets, schedule", [
    (0, ["device:100KB", "cpu"], "overlap"), (1, ["device:100KB", "cpu"], "overlap"),
    (2, ["device:60KB", "cpu:60KB", "disk"], "overlap"), (2, ["device:60KB", "cpu:60KB", "disk"], "delayed"),
])  # fmt: skip
def test_what_stays_on_a_device_was_planned(stage: int, budgets: list[str], schedule: str, tier: Tier) -> None:
    """What crosses the link in a step, and what lies where."""
    alone(as_planned, stage, budgets, schedule, tier())


def test_a_copy_does_not_wait_for_what_is_updated_on_the_device(
    devices: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is busy with its part until the host's part has been stored."""
    stored = threading.Event()

    class Storing(PlayedDevice):
        def copy(self, stream: Any, pairs: Any) -> None:
            super().copy(stream, pairs)
            if stream.name == "up":
                self._give(stream, lambda _: stored.set())

    device, run = devices(Storing), StepTable.run
    late: list[bool] = []

    def waits(self: Any, *given: Any) -> None:
        if threading.current_thread() is device.compute.thread:
            late.append(stored.wait(10.0))
        run(self, *given)

    weights = [device.own(nn.Parameter(torch.full((64, 64), 2.0))) for _ in range(2)]
    opt = zk.AdamW(weights, lr=0.1, tier=["device:40KB", "cpu"], schedule="overlap", max_grad_norm=1.0)
    monkeypatch.setattr(StepTable, "run", waits)
    for _ in range(2):
        stored.clear()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        opt.step()
        opt.flush()
        device.synchronize()
    assert late == [True, True] and same_bits(*weights)
