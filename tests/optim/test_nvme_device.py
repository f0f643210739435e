"""State on disk for parameters on a played device: the bits of state in memory, and what a failing disk leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nvme_cases import Tier, begun, row_of, small
from offload_cases import (
    SCHEDULES,
    Row,
    backward,
    on_device,
    one_thread,
    optimizer_of,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from test_offload_played import SLOW, compare, halve, played, the_same
from waiting_device import HostComputes
from worlds import World, on_threads

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.optim.binding import Binding

NAMES = ["sync", "overlap", "delayed"]
BF16 = {"dtype": torch.bfloat16}


@each("slow", ["copies down", "copies up"])
@each("schedule", NAMES)
def test_whatever_is_slow(schedule: str, slow: str, devices: Callable, tier: Tier) -> None:
    the_same(*played(devices(**SLOW[slow]), SCHEDULES[schedule], tier=small(tier, 1)[0], broken=(3,), **BF16))


@each("kept", [True, False])
@each("schedule", NAMES)
def test_accumulated_edited_and_broken_gradients(kept: bool, schedule: str, devices: Callable, tier: Tier) -> None:
    slow, settings = devices(**SLOW["copies down"]), {"accumulate": 3, "keep_gradients": kept, "broken": (4, 9, 10)}
    (where,) = small(tier, 1)
    the_same(*played(slow, SCHEDULES[schedule], tier=where, steps=6, before_step=halve, **settings))


@each("row, schedule", [
    (row_of("stage 1", "fp32", "often", accumulate=2), "sync"),
    (row_of("stage 3", "mixed", accumulate=2, broken=(3,)), "overlap"),
])  # fmt: skip
def test_two_ranks_that_autograd_trains(row: Row, schedule: str, tier: Tier) -> None:
    """State and parameters of the loop by hand, with everything where it computes."""
    on_threads(2, compare, row, SCHEDULES[schedule], small(tier, 2))


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


@each("wrap, moment, says", [("stage 0", 0, "Nothing was changed"), ("stage 3", 7, "The step was broken off")])
def test_a_disk_that_fails_on_one_rank_fails_a_sync_step_on_all(
    wrap: str, moment: int, says: str, devices: Callable, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that very step: on no rank does it return well."""
    row, tiers, compute = row_of(wrap, "bf16"), small(tier, 2), Binding._compute

    def broken(self: Binding, i: int, slot: Any) -> None:
        steps = float(next(iter(self.tier.state.values()))["step"])
        if steps >= 2 and (i == moment if self.tier._disk.tier.config is tiers[1] else moment == 0):
            raise zk.IoError("the disk failed", path="swap", errno=5)
        compute(self, i, slot)

    monkeypatch.setattr(Binding, "_compute", broken)

    def work(world: World) -> tuple[list[float], str, bool]:
        model = row.model(world)
        on_device(devices(HostComputes), row, model)
        optimizer = optimizer_of(row, model, tier=tiers[world.rank])
        train(world, row, model, optimizer, range(2))
        before, said = values(model), ""
        backward(world, row, model, 2)
        try:
            optimizer.step()
        except zk.ZerokernError as error:
            said = str(error)
        return said, optimizer.holdings.torn, same_bits(values(model), before)

    with one_thread():
        found = on_threads(2, work)
    for said, torn, same in found:
        assert "the disk failed" in said and says in said
        assert torn == bool(moment) and (same or torn)
