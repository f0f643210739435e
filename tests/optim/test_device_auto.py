"""`"device:auto"`: what a step leaves free on the device, known when a backward pass has run, and not changed later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Tier, row_of
from offload_cases import SCHEDULES, Row, agree, on_device, optimizer_of, train
from optim_cases import same_bits
from played_cases import UNITS
from tables import each
from torch import nn
from waiting_device import HostComputes
from worlds import World, on_ranks, on_threads, ranked

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.examples.played import PlayedTraining
from zerokern.examples.played_device import PlayedDevice
from zerokern.memory.staging import CudaDriver

HAS = 1_000_000


def staying(opt: Any) -> list[bool]:
    """By parameter, whether its state is on the device."""
    return [copy.stays is not None for copy in opt.holdings.host.of(opt.holdings.shards.local)]


@each("schedule", ["sync", "overlap"])
@each("peak", [800_000, 870_000, 899_000, 2_000_000])
def test_it_is_the_budget_that_the_device_leaves(schedule: str, peak: int, devices: Callable) -> None:
    """0.9 of what it has, less the peak: the bits, and the places, of the same number of bytes; or nothing."""
    free = max(0, 900_000 - peak)
    found = []
    for tier in (["device:auto", "cpu"], [f"device:{free}B", "cpu"] if free else "cpu"):
        training = PlayedTraining(devices(memory_nbytes=HAS, peak_nbytes=peak), UNITS, dtype=torch.bfloat16)
        opt = zk.AdamW(training.parameters, lr=1e-2, tier=tier, schedule=SCHEDULES[schedule], max_grad_norm=70.0)
        training.train(opt, 5)
        opt.flush()
        found.append((training.values(), staying(opt)))
    assert same_bits(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert (any(found[0][1]), all(found[0][1])) == (peak < 900_000, peak == 800_000)


def trained(device: PlayedDevice, tier: Any, sizes: tuple[int, ...] = (64, 64, 64)) -> tuple[list[nn.Parameter], Any]:
    weights = [device.own(nn.Parameter(torch.full((size, 64), 2.0))) for size in sizes]
    return weights, zk.AdamW(weights, lr=0.1, tier=tier, max_grad_norm=1.0)


def step(device: PlayedDevice, weights: list[nn.Parameter], opt: Any) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    opt.step()
    opt.flush()
    device.synchronize()


def test_it_is_said_and_does_not_change(devices: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """In the log and in the statistics; what is trained later has what is left of it, whatever the peak is by then."""
    device = devices(memory_nbytes=HAS, peak_nbytes=820_000)
    weights, opt = trained(device, ["device:auto", "cpu"])
    late = device.own(nn.Parameter(torch.full((8, 64), 2.0)))
    assert "state_budget_bytes/device" not in opt.statistics()
    with caplog.at_level(logging.INFO, "zerokern"):
        step(device, weights, opt)
    says = "state takes 80000 bytes of cpu, 90 % of 1000000 bytes less 820000 at the peak so far"
    assert [says in record.getMessage() for record in caplog.records] == [True]
    assert staying(opt) == [True, True, False] and opt.statistics()["state_budget_bytes/device"] == 80_000
    device.peak_nbytes = 0
    opt.add_param_group({"params": [late]})
    step(device, [*weights, late], opt)
    assert staying(opt) == [True, True, False, True] and opt.statistics()["state_budget_bytes/device"] == 80_000
    assert same_bits([weights[0][:8]], [weights[2][:8]])
    others, second = trained(device, ["device:auto", "cpu"])
    step(device, others, second)
    claimed = 8 * sum(weight.numel() for weight in (*weights[:2], late))
    assert second.statistics()["state_budget_bytes/device"] == 80_000 - claimed, "also what came later"


def test_what_one_optimizer_has_claimed_is_not_free_for_another(devices: Callable) -> None:
    """Of one model, in the same step: no pass has shown the state of the first when the second asks. Nor may it exist
    yet. What a later pass has shown is not counted twice, and a closed optimizer has nothing."""
    device = devices(memory_nbytes=HAS, peak_nbytes=820_000)
    (weights, opt), (others, second) = (trained(device, ["device:auto", "cpu"]) for _ in range(2))
    elsewhere, apart = trained(devices(memory_nbytes=HAS, peak_nbytes=820_000), ["device:auto", "cpu"])
    for some, one in ((weights, opt), (others, second), (elsewhere, apart)):
        step(device, some, one)
    assert staying(opt) == staying(apart) == [True, True, False] and staying(second) == [False] * 3
    assert second.statistics()["state_budget_bytes/device"] == 80_000 - opt.holdings.placing.claimed > 0
    more, fourth = trained(device, ["device:auto", "cpu"])
    step(device, more, fourth)
    assert staying(fourth) == [False] * 3, "nor is it for one after that"
    device.peak_nbytes = 820_000 + opt.holdings.placing.claimed - 40_000
    opt.close()
    late, third = trained(device, ["device:auto", "cpu"])
    step(device, late, third)
    assert staying(third) == [True, False, False]


def with_memory(world: World, row: Row, schedule: str, last: list[Any]) -> None:
    """Rank 0's device has room for some, rank 1's for nothing."""
    peak = (870_000, 950_000)[world.rank]
    device = HostComputes(memory_nbytes=HAS, peak_nbytes=peak)
    model, twin = row.model(world), row.model(world)
    expected = train(world, row, twin, optimizer_of(row, twin, schedule=SCHEDULES[schedule]))
    on_device(device, row, model)
    opt = optimizer_of(row, model, tier=["device:auto", last[world.rank]], schedule=SCHEDULES[schedule])
    found = train(world, row, model, opt, between=lambda step: device.synchronize())
    opt.flush()
    device.synchronize()
    agree(found, expected, ahead=True)
    there = sum(copy.stays or 0 for copy in opt.holdings.host.copies.values())
    assert (there > 0) == (world.rank == 0) and there <= 30_000
    assert opt.statistics()["state_budget_bytes/device"] == max(0, 900_000 - peak)
    device.close()


@each("schedule, row", [
    ("sync", row_of("stage 1", "bf16", steps=4)),
    ("overlap", row_of("stage 2", "fp32", steps=4, broken=(2,))),
    ("overlap", row_of("stage 3", "bf16", steps=4)),
])  # fmt: skip
def test_ranks_have_what_their_devices_leave(schedule: str, row: Row, tier: Tier) -> None:
    on_threads(2, with_memory, row, schedule, [tier(ring_nbytes="32K") for _ in range(2)])


def test_a_load_before_anything_is_known_is_refused(devices: Callable, tmp_path: Path) -> None:
    """It changes nothing, and says what to do; that done, the training goes on with the same bits."""

    def model() -> Any:
        device = devices(memory_nbytes=HAS, peak_nbytes=820_000)
        made = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        for param in made.parameters():
            nn.init.constant_(device.own(param), 2.0)
        opt = zk.AdamW(made.parameters(), lr=0.1, tier=["device:auto", "cpu"], max_grad_norm=1.0)
        return made, opt, device

    first, opt, device = model()
    step(device, list(first.parameters()), opt)
    zk.save(tmp_path / "saved", first, opt)
    kept = opt.state_dict()
    for how in ("file", "dict"):
        other, mine, there = model()

        def load(other: Any = other, mine: Any = mine, how: str = how) -> None:
            if how == "file":
                zk.load(tmp_path / "saved", other, mine)
            else:
                other.load_state_dict(first.state_dict())
                mine.load_state_dict(kept)

        with pytest.raises(StateError, match="no backward pass has shown that; load after one step, which"):
            load()
        assert not mine.state and not mine.holdings.torn
        step(there, list(other.parameters()), mine)
        load()
        assert staying(mine) == [True, True, False]
        twin, theirs, elsewhere = model()
        for one, optimizer, place in ((other, mine, there), (twin, theirs, elsewhere)):
            for _ in range(1 if one is other else 2):
                step(place, list(one.parameters()), optimizer)
        assert same_bits(list(other.parameters()), list(twin.parameters()))


@ranked
def loading(world: World, folder: Path) -> None:
    """One rank's device says bytes, the other's does not: both are told, and neither changes anything."""
    row = row_of("stage 2", "fp32", steps=2)
    model = row.model(world)
    opt = optimizer_of(row, model)
    train(world, row, model, opt)
    zk.save(folder, model, opt)
    device = HostComputes(memory_nbytes=HAS, peak_nbytes=820_000)
    other = row.model(world)
    on_device(device, row, other)
    mine = optimizer_of(row, other, tier=(["device:8KB", "cpu"], ["device:auto", "cpu"])[world.rank])
    before = [param.detach().clone() for param in other.parameters()]
    with pytest.raises(zk.ZerokernError, match="no backward pass has shown that"):
        zk.load(folder, other, mine)
    assert same_bits(before, list(other.parameters())) and not mine.state and not mine.holdings.torn
    device.close()


def test_ranks_refuse_such_a_load_together(tmp_path: Path) -> None:
    on_ranks(2, loading, tmp_path / "saved")


def test_a_step_without_a_gradient_says_nothing_of_the_peak(devices: Callable) -> None:
    device = devices(memory_nbytes=HAS)
    weights, opt = trained(device, ["device:auto", "cpu"])
    with pytest.raises(StateError, match="no backward pass has shown that"):
        opt.step()
    step(device, weights, opt)
    assert staying(opt) == [True, True, True]


@each("schedule", ["sync", "overlap", "delayed"])
@each("stage", [None, 2, 3])
def test_a_load_waits_for_no_pass_where_parameters_are_on_a_cpu(schedule: str, stage: int | None) -> None:
    """There is no device of which a pass would show what is free."""

    def made() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        if stage is not None:
            zk.shard(model, stage=stage)
        return model, zk.AdamW(model.parameters(), tier=["device:auto", "cpu"], schedule=SCHEDULES[schedule])

    def train(model: nn.Module, opt: Any) -> None:
        for number in range(2):
            model(torch.full((2, 4), number + 1.0)).square().sum().backward()
            opt.step()
            opt.zero_grad()

    model, opt = made()
    train(model, opt)
    opt.flush()
    other, mine = made()
    other.load_state_dict(model.state_dict())
    mine.load_state_dict(opt.state_dict())
    for each_model, each_opt in ((model, opt), (other, mine)):
        train(each_model, each_opt)
        each_opt.flush()
    with torch.no_grad():
        assert same_bits(*([one(torch.eye(4))] for one in (model, other)))


def test_memory_of_a_cpu_has_nothing_beside_the_host(tier: Tier) -> None:
    """So a line that is written for GPUs does on a CPU what it does without "device:auto"."""
    for first, last in ((["cpu:9000B"], tier), ([], tier), ([], lambda: "cpu")):
        places = []
        for auto in (["device:auto"], []):
            params = [nn.Parameter(torch.ones(1000)) for _ in range(3)]
            opt = zk.AdamW(params, tier=[*auto, *first, last()])
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
            found = opt.statistics()
            assert "state_budget_bytes/device" not in found
            places.append({tier: found[f"state_bytes/{tier}"] for tier in ("device", "cpu", "disk")})
        assert places[0] == places[1]


def test_what_a_gpu_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes' memory, the context's, and the most that the allocator has held, whatever it holds now."""
    driver = CudaDriver.__new__(CudaDriver)
    driver.device = torch.device("cuda", 0)
    for name, value in (("mem_get_info", (50, 80)), ("memory_reserved", 20), ("max_memory_reserved", 35)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert driver.memory() == (80, 45)
