"""State in several tiers, and updates that stream: bytes as planned, and copies that wait for none of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nvme_cases import Tier
from offload_cases import SCHEDULES, Row, on_device
from optim_cases import same_bits
from played_cases import Counting
from tables import each
from torch import nn
from worlds import World, alone

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.kernels.cpu import UpdateTable
from zerokern.optim import transit

ROLES = ("host parameters", "host gradients", "shadow", "remainder", "exp_avg", "exp_avg_sq")
STREAMS = {"update": "device"}
SMALL = {"state_format": "int8", "master_format": "split8"}


def as_planned(
    world: World, stage: int, budgets: list[str], schedule: str, settings: dict[str, Any], disk: Any, played: bool
) -> None:
    device, model = Counting(), nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(5)]).to(torch.bfloat16)
    words = ["nvme" if one == "disk" else one for one in budgets]
    sharded = {"stage": stage, "bucket_bytes": 1 << 13} if stage else {"stage": 0}
    settings = {"schedule": SCHEDULES[schedule], **settings}
    plan = zk.plan(model, tier=words, device="cuda" if played else "cpu", **sharded, **settings)
    if stage:
        zk.shard(model, **sharded)
    if played:
        on_device(device, Row(f"stage {stage}" if stage else "plain"), model)
    tiers = [disk if one == "disk" else one for one in budgets]
    opt = zk.AdamW(model.parameters(), tier=tiers, max_grad_norm=1.0, **settings)
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
    assert (
        opt.statistics()["state_bytes/disk"] == plan.tiers.get("nvme", 0) == plan.moved("read") == plan.moved("write")
    )
    if "disk" in budgets:
        of_disk = opt.holdings.disk.tier.swap.stats()
        assert of_disk["written_nbytes"] == 2 * plan.moved("write") and of_disk["read_nbytes"] == plan.moved("read")
    held = zk.measure(model, opt)
    assert held.pinned == plan.pinned == opt.holdings.room.nbytes
    for role in ROLES:
        assert held.roles.get(role, 0) == plan.roles.get(role, 0), role
    assert plan.roles.get("shadow", 0) == 2 * plan.numel * (played and schedule == "delayed")
    assert (plan.slots_nbytes > 0) == ("update" in settings)
    assert held.roles.get("ring", 0) == plan.slots_nbytes or "disk" in budgets
    placed = {tier: sum(n for one in plan.placed if one.tier == tier for _, n in one.tensors) for tier in plan.tiers}
    if played:
        staying = sum(copy.stays or 0 for copy in opt.holdings.host.copies.values())
        assert staying == placed.get("device", 0) and (staying > 0) == ("device" in budgets[0])
    in_memory = placed.get("device", 0) + (placed.get("cpu", 0) or plan.tiers["cpu"])
    assert schedule == "delayed" or opt.statistics()["state_bytes/cpu"] == in_memory + 4 * 5, "of a played device, too"
    device.close()


@each("stage, budgets, schedule, settings, played", [
    (0, ["device:100KB", "cpu"], "overlap", {}, True), (1, ["device:100KB", "cpu"], "overlap", {}, True),
    (2, ["device:60KB", "cpu:60KB", "disk"], "overlap", {}, True),
    (2, ["device:60KB", "cpu:60KB", "disk"], "delayed", {}, True), (2, ["device:60KB", "cpu"], "delayed", {}, True),
    (0, ["device:60KB", "cpu:60KB", "disk"], "delayed", {}, True),
    (0, ["device:10MB", "cpu"], "delayed", {}, True), (0, ["cpu:100KB", "disk"], "sync", {}, False),
    (0, ["cpu:40KB", "disk"], "delayed", {}, False), (0, ["device:40KB", "cpu"], "delayed", {}, False),
    (0, ["cpu"], "sync", STREAMS, True), (0, ["cpu"], "sync", {**STREAMS, **SMALL}, True),
    (0, ["device:50KB", "cpu"], "sync", STREAMS, True), (0, ["device:50KB", "cpu"], "sync", {**STREAMS, **SMALL}, True),
])  # fmt: skip
def test_what_stays_on_a_device_was_planned(
    stage: int, budgets: list[str], schedule: str, settings: dict[str, Any], played: bool, tier: Tier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What crosses the link and comes from the disk in a step, and what lies where."""
    monkeypatch.setattr(transit, "_LEAST", 8192)
    alone(as_planned, stage, budgets, schedule, settings, tier(), played)


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

    device, run = devices(Storing), UpdateTable.run
    late: list[bool] = []

    def waits(self: Any, *given: Any) -> None:
        if threading.current_thread() is device.compute.thread:
            late.append(stored.wait(10.0))
        run(self, *given)

    weights = [device.own(nn.Parameter(torch.full((64, 64), 2.0))) for _ in range(2)]
    opt = zk.AdamW(weights, lr=0.1, tier=["device:40KB", "cpu"], schedule="overlap", max_grad_norm=1.0)
    monkeypatch.setattr(UpdateTable, "run", waits)
    for _ in range(2):
        stored.clear()
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        opt.step()
        opt.flush()
        device.synchronize()
    assert late == [True, True] and same_bits(*weights)
