"""State on disk for parameters on a played device: what a step moves is what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvme_cases import Tier, begun, row_of
from offload_cases import (
    SCHEDULES,
    Row,
    backward,
    on_device,
    one_thread,
    train,
)
from tables import each
from waiting_device import HostComputes
from worlds import World

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice


def on(device: PlayedDevice, row: Row, schedule: str, where: Any, seed: int = 0) -> tuple[Any, Any]:
    model, optimizer = begun(row, schedule, where, seed)
    on_device(device, row, model)
    return model, optimizer


@each("schedule, wrap", [("sync", "plain"), ("overlap", "stage 2"), ("delayed", "plain")])
def test_bytes_of_a_step_are_those_of_the_plan(schedule: str, wrap: str, devices: Callable, tier: Tier) -> None:
    """At the disk, but for the ends of records: 12 for each parameter with an fp32 master; and in host memory."""
    row, (where,) = row_of(wrap, "bf16", formats=(("master_format", "fp32"),)), [tier(ring_nbytes="1M")]
    model, optimizer = on(devices(HostComputes), row, schedule, where)
    asked = {"stage": 2, "tier": where, "schedule": SCHEDULES[schedule], "master_format": "fp32", "device": "cuda"}
    plan = zk.plan(model, **asked)
    assert plan.moved("read") == plan.moved("write") == 12 * plan.numel
    assert plan.moved("down") == plan.moved("up") == 2 * plan.numel
    train(World(0, 1), row, model, optimizer, range(2))
    optimizer.flush()
    before = optimizer.holdings.disk.tier.swap.stats()
    with one_thread():
        backward(World(0, 1), row, model, 2)
        optimizer.step()
        optimizer.flush()
    after, ends = optimizer.holdings.disk.tier.swap.stats(), 4096 * len(optimizer.holdings.disk.records)
    for way in ("read_nbytes", "written_nbytes"):
        assert 12 * plan.numel <= after[way] - before[way] <= 12 * plan.numel + ends
    measured = zk.measure(model, optimizer)
    assert measured.pinned == plan.pinned > 0
    for role in ("host parameters", "host gradients", "shadow", "ring", "master", "exp_avg", "exp_avg_sq"):
        assert measured.roles.get(role) == plan.roles.get(role), role
