"""Parameters at rest: what lies in which tier, what moves in a step, where gradients wait, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerokern as zk
from zerokern.core.errors import BudgetError
from zerokern.planner import Transformer
from zerokern.planner.forecast import step_program

SMALL = {"state_format": "int8", "master_format": "split8"}
SCHEDULES = ("sync", "overlap", zk.Delayed())
LANES = ("up", "down", "read", "write")
SHAPE = Transformer(24, 2048, heads=16, batch=8, seq=1024)
GB = 10**9


def at_rest(model: object = "1B", param_tier: str = "nvme", tier: str = "nvme", **asked: object) -> zk.Plan:
    return zk.plan(model, stage=3, param_tier=param_tier, tier=tier, **({"device": "cuda"} | asked))


def order(budgets: Any, last: str) -> Any:
    """What `tier=` is given."""
    return [*(f"{tier}:{nbytes}" for tier, nbytes in budgets), last] if budgets else last


def per_parameter(plan: zk.Plan) -> tuple[float, ...]:
    """Bytes up, down, read and written for each parameter that this rank has of its own."""
    return tuple(round(plan.moved(lane) * plan.world / plan.numel, 3) for lane in LANES)


def model() -> nn.Module:
    """Units of different sizes, one frozen, and a root around them."""
    units = [nn.Linear(256, 256 + 128 * i, dtype=torch.bfloat16) for i in range(4)]
    made = nn.Sequential(nn.Linear(64, 256, dtype=torch.bfloat16), nn.ModuleList(units))
    units[1].requires_grad_(False)
    return made


class TestBytes:
    """The contract of design.md, section 9: parameters twice up, gradients once down."""

    def test_all_on_disk(self) -> None:
        """But under "overlap", whose next forward finds them in memory, an update reads parameters once more."""
        for world, schedule, formats, moved in (
            (1, "overlap", {}, (4, 2, 14, 12)),
            (8, "overlap", SMALL, (4, 2, 7.063, 5.063)),
            (1, "sync", {}, (4, 2, 16, 12)),
            (8, "sync", SMALL, (4, 2, 9.063, 5.063)),
        ):
            plan = at_rest(world=world, schedule=schedule, **formats)
            assert per_parameter(plan) == pytest.approx(moved, abs=0.002)

    def test_other_tiers(self) -> None:
        assert per_parameter(at_rest(param_tier="cpu", tier="cpu")) == (4, 2, 0, 0)
        assert per_parameter(at_rest(param_tier="cpu", tier="nvme")) == (4, 2, 10, 10)
        assert per_parameter(at_rest(param_tier="nvme", tier="cpu", schedule="overlap")) == (4, 2, 4, 2)
        assert per_parameter(at_rest(device="cpu", schedule="overlap")) == (0, 0, 14, 12), "the host is the device"
        assert per_parameter(zk.plan("1B", tier="cpu")) == (2, 2, 0, 0), "parameters that stay are updated elsewhere"

    def test_micro_batches_fetch_anew_and_slices_do_not(self) -> None:
        horizontal = per_parameter(at_rest(schedule="overlap", accumulate=8))
        vertical = per_parameter(at_rest(schedule="overlap", micro=8))
        assert horizontal == (4 * 8, 2 * 8, 10 + 4 * 8, 12)
        assert vertical == (4, 2, 14, 12)

    def test_what_stays_is_fetched_once(self) -> None:
        """What is in no unit, and the last unit, where forward turns to backward."""
        plan = at_rest(model(), schedule="overlap")
        units = [sum(p.numel() for p in unit.parameters()) for unit in model()[1]]
        root = sum(p.numel() for p in model()[0].parameters())
        padding = 2 * 128 * 2 * 6
        assert plan.moved("up") == pytest.approx(2 * (2 * sum(units) + root - units[-1]), abs=padding)
        trained = plan.numel - units[1]
        assert plan.moved("write") == pytest.approx(12 * trained, abs=12 * padding)

    @pytest.mark.parametrize("what", ["number", "module", "shape"])
    def test_the_program_moves_what_the_plan_says(self, what: str) -> None:
        subject = {"number": "3B", "module": model(), "shape": SHAPE}[what]
        share = {"number": "1GB", "module": "200KB", "shape": "300MB"}[what]
        some, three = [f"cpu:{share}", "nvme"], [f"device:{share}", f"cpu:{share}", "nvme"]
        for asked in (
            {}, {"param_tier": "cpu"}, {"keep": "cpu"}, {"keep": "nvme", "accumulate": 3}, {"param_tier": some},
            {"param_tier": some, "tier": some, "device": "cpu"}, {"param_tier": three}, {"keep": three}, {"keep": some},
            {"param_tier": three, "world": 2},
        ):  # fmt: skip
            for schedule in SCHEDULES:
                if asked.get("param_tier") != "cpu" and isinstance(schedule, zk.Delayed):
                    continue  # refused
                plan = at_rest(subject, schedule=schedule, **asked)
                program = step_program(plan, "delayed" if isinstance(schedule, zk.Delayed) else schedule, 3 * 8192)
                for lane in LANES:
                    told = sum(op.nbytes for op in program.ops if op.lane == lane)
                    assert told == pytest.approx(plan.moved(lane), rel=0.002), (asked, schedule, lane)
                flops = (8 if "keep" in asked else 6) * plan.numel * 3 * 8192
                if what != "module":
                    assert sum(op.flops for op in program.ops) == pytest.approx(flops, rel=1e-3)


class TestTiers:
    @pytest.mark.parametrize("formats, bytes_", [({}, 12), (SMALL, 5.0625)])
    def test_what_rests_where(self, formats: dict, bytes_: float) -> None:
        """Parameters and state on disk, gradients in host memory; on the device two buffers of gradients."""
        tiers = at_rest("8B", **formats).tiers
        assert tiers["nvme"] == bytes_ * 8 * GB
        assert tiers["cpu"] == 2 * 8 * GB + (128 << 20) and tiers["device"] == 64 << 20

    def test_units_are_whole_on_the_device_one_by_one(self) -> None:
        plan = at_rest(Transformer(80, 8192), "cpu", "cpu")
        assert plan.roles["gathered"] == 2 * 2 * 12 * 8192**2
        assert plan.total < 5 * GB and plan.tiers["cpu"] == 14 * plan.numel

    def test_a_delay_needs_room_for_what_is_shown_later(self) -> None:
        for param_tier in ("cpu", ["cpu:16GB", "nvme"]):  # which is room for all of them
            exact, delayed = (at_rest("8B", param_tier, schedule=one) for one in ("sync", zk.Delayed()))
            assert delayed.tiers["cpu"] - exact.tiers["cpu"] == (2 + 2) * 8 * GB, "values, and gradients"
            assert delayed.tiers["nvme"] == exact.tiers["nvme"]

    @pytest.mark.parametrize("param_tier", ["nvme", ["cpu:15GB", "nvme"]])
    def test_a_delay_is_refused_where_parameters_are_on_a_disk(self, param_tier: object) -> None:
        """With the words of the optimizer; other plans of the same schedule keep them off the disk."""
        with pytest.raises(ValueError, match="'sync' or 'overlap' for parameters that rest on a disk"):
            at_rest("8B", param_tier, schedule=zk.Delayed())
        assert "delayed" not in at_rest("8B", param_tier).predict("h100-pcie").needed
        small = zk.plan("70B", schedule=zk.Delayed(), tier="cpu", device_memory="80GB", host_memory="300GB")
        assert small.would_fit() == [], "on the device or in host memory is no room for the parameters"

    @pytest.mark.parametrize("keep", ["cpu", "nvme"])
    def test_inputs_leave_but_for_the_last_one_and_one_that_comes_back(self, keep: str) -> None:
        plan, one = at_rest(SHAPE, keep=keep), SHAPE.checkpoint
        held = {held.tier: held.nbytes for held in plan.held if held.role == "checkpoints"}
        assert held == {"device": 2 * one, keep: 23 * one}
        assert plan.kept == 23 * one

    @pytest.mark.parametrize("micro, device", [(1, 3), (8, 3.125)])
    def test_inputs_fill_tiers_from_the_latest_on(self, micro: int, device: float) -> None:
        """Of 23 at rest; slices of a batch are placed one by one. What is in each moves over its lanes twice."""
        one = SHAPE.checkpoint
        keep = [f"device:{3 * one + one // 5}B", f"cpu:{7 * one}B", "nvme"]
        plan = at_rest(SHAPE, keep=keep, micro=micro, accumulate=2)
        disk = (23 - device - 7) * one
        assert plan.kept_in == {"device": device * one, "cpu": 7 * one, "nvme": disk}
        held = dict.fromkeys(plan.kept_in, 0)
        for holding in plan.held:
            held[holding.tier] += holding.nbytes * (holding.role == "checkpoints")
        assert held == {"device": (device + 2) * one, "cpu": 7 * one, "nvme": disk}
        moved = {move.lane: move.nbytes for move in plan.moves if move.role == "checkpoints"}
        assert moved == {"up": 2 * (disk + 7 * one), "down": 2 * (disk + 7 * one), "read": 2 * disk, "write": 2 * disk}
        single = at_rest(SHAPE, keep="nvme", micro=micro)
        assert at_rest(SHAPE, keep=["nvme"], micro=micro).held == single.held
        in_memory = zk.plan(SHAPE, stage=3, tier="nvme", keep=keep, micro=micro, device="cpu")
        assert in_memory.kept_in["device"] == pytest.approx((device + 7) * one, abs=one // micro)

    def test_on_a_cpu_what_rests_in_host_memory_is_on_the_device(self) -> None:
        plan = zk.plan("1B", stage=3, param_tier="cpu", keep="cpu", device="cpu")
        assert not plan.recipe.rests and plan.moves == []


class TestGradients:
    def test_they_wait_on_the_disk_where_the_host_is_too_small(self) -> None:
        """70B on 128 GiB: 140 GB of gradients."""
        large, small = (at_rest("70B", host_memory=host, schedule="overlap") for host in ("256GiB", "128GiB"))
        assert (large.settings.spills, small.settings.spills) == (False, True)
        assert per_parameter(large) == (4, 2, 14, 12) and per_parameter(small) == (4, 2, 16, 14)
        assert small.tiers["nvme"] - large.tiers["nvme"] == 140 * GB and not small.missing
        assert "they wait on the disk" in str(small) and "they wait on the disk" not in str(large)

    def test_ranks_share_a_host(self) -> None:
        """1T on a DGX-2 of 1.5 TB: 2 TB of gradients. Eight ranks on a host unless it is said."""
        assert at_rest("1T", world=16, host_memory="1.5TB", ranks_per_host=16).settings.spills
        assert not at_rest("1T", world=16, host_memory="1.5TB").settings.spills, "two hosts of 8"
        assert at_rest("1T", world=16, host_memory="1.5TB").budget["cpu"] == 1.5e12 // 8

    def test_without_a_disk_they_cannot(self) -> None:
        plan = at_rest("70B", "cpu", "cpu", host_memory="128GiB")
        assert not plan.settings.spills and plan.missing == {"host memory": 980 * GB - (128 << 30)}


class TestBudget:
    def test_what_does_not_fit_is_refused_with_what_would(self) -> None:
        plan = at_rest("70B", "cpu", "cpu", host_memory="128GiB", disk="4TB", device_memory="h100")
        with pytest.raises(BudgetError) as refused:
            plan.require()
        said = str(refused.value)
        assert said.startswith("70B parameters, on 1 rank do not fit: 843 GB of host memory are missing")
        assert "| parameters " in said and 'param_tier=["cpu:123GB", "nvme"], tier="nvme"' in said
        assert 'state_format="int8", master_format="split8" *(lossy)*' in said

    def test_what_would_fit_does(self) -> None:
        for one in zk.plan("70B", device_memory="h100", host_memory="128GiB", disk="4TB").would_fit():
            again = zk.plan(
                "70B", stage=3, param_tier=order(one.recipe.param_budgets, one.recipe.param_tier),
                tier=order(one.budgets, one.recipe.tier), device_memory="h100", host_memory="128GiB", disk="4TB",
                state_format=one.recipe.state_format, master_format=one.recipe.master_format,
            )  # fmt: skip
            again.require()
            assert again.tiers == one.tiers

    @pytest.mark.parametrize("host, of_params, of_state", [(100, 89, 0), (200, None, 39), (400, None, 79)])
    def test_it_fills_host_memory_before_the_disk(self, host: int, of_params: int | None, of_state: int) -> None:
        """By the rule of `tier=` with budgets: parameters first, and no part of them on disk needlessly."""
        found = zk.plan("70B", device_memory="h100", host_memory=f"{host}GB", disk="4TB").would_fit()
        (exact,) = [one for one in found if not one.recipe.is_lossy()]
        params = () if of_params is None else (("cpu", of_params * GB),)
        assert (exact.recipe.param_budgets, exact.recipe.param_tier) == (params, "nvme" if params else "cpu")
        assert (exact.budgets, exact.recipe.tier) == ((("cpu", of_state * GB),) if of_state else (), "nvme")
        assert (0.9 * host - 2) * GB < exact.tiers["cpu"] <= 0.9 * host * GB and not exact.missing


class TestText:
    def test_the_page(self) -> None:
        text = str(at_rest(SHAPE, world=2, keep="cpu", host_memory="64GB", disk="1TB", device_memory="h100"))
        assert not any(line != line.rstrip() for line in text.splitlines())
        for says in (
            "parameters at rest on NVMe",
            "inputs of units kept in host memory",
            "| fits h100 (80 GB) ",
            "| fits what a rank has ",
            "| bytes per parameter of its own |",
            "to other ranks",
            "GB to the disk, which wears",
        ):
            assert says in text
        tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
        assert len(tables) == 3 and all(len({len(line) for line in lines}) == 1 for lines in tables)
