"""`zk.plan(optimizer="muon")` with state on a disk, in several tiers, and parameters at rest: every byte of a real run,
on one rank to three; what is refused, and what is advised."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import DISK, STATES, Mixed, Run, Seen, all_seen
from ranks import run_ranks
from tables import each
from torch import nn
from waiting_device import played

import zerokern as zk
from zerokern.cli.main import main
from zerokern.planner.filling import has_room, less_reserve
from zerokern.planner.forecast import step_program
from zerokern.planner.recipe import Recipe

SMALL = {"state_format": "int8", "master_format": "split8"}
WITH_MASTER = {"state_format": "bf16", "master_format": "fp32"}
SOME = ["cpu:1MB", DISK]
DELAYED = zk.Delayed()
TOLERANCE = 0.01


def assert_planned(run: Run, ranks: list[Seen]) -> None:
    """Of the rank that has most; no other has more of it."""
    first = ranks[0]
    most = ranks[first.rank]
    left_out = {("buffers", "memory")} if run.param_tier != "device" else set()  # of gradients on their way, in a step
    if run.stage == 2:  # of matrices of several layers more may be filled at once than the two that are planned
        left_out |= {("buffers", "memory")}
        assert most.held.get(("buffers", "memory"), 0) >= most.planned.get(("buffers", "memory"), 0), run
    if not run.wraps:  # nobody pads
        left_out |= {("parameters", "memory"), ("gradients", "memory")}
    planned, held = ({key: n for key, n in some.items() if key not in left_out} for some in (most.planned, most.held))
    assert planned == held, run
    assert most.planned_disk == most.disk, run
    assert most.pinned[0] == most.pinned[1], run
    assert most.planned_where in ({}, most.where), run
    on_disk = sum(nbytes for (role, tier), nbytes in most.planned.items() if tier == "disk" and role in STATES)
    assert most.statistics["disk"] == on_disk, run
    for lane, nbytes in most.planned_kernel.items():
        assert abs(most.kernel[lane] - nbytes) <= TOLERANCE * nbytes, (run, lane, most.kernel, nbytes)
    matrices = [sum(n for (role, _), n in one.held.items() if role == "momentum_buffer") for one in ranks]
    assert max(matrices) == matrices[first.rank], run


def trained(size: int, runs: list[Run], folder: Path) -> None:
    ranks = run_ranks(size, all_seen, runs, str(folder), timeout=240.0)
    for number, run in enumerate(runs):
        assert_planned(run, [found[number] for found in ranks])


QUICK = {
    1: [
        Run(0, DISK, wraps=False),
        Run(0, SOME, SMALL, schedule=DELAYED, wraps=False),
        Run(3, SOME, {}, "fp32", schedule="overlap", chained=True),
        Run(3, DISK, param_tier=DISK, bias=False),
        Run(3, SOME, SMALL, param_tier=DISK, bias=False),
    ],
    2: [
        Run(1, DISK, schedule="overlap"),
        Run(2, SOME, WITH_MASTER, chained=True),
        Run(0, SOME, schedule=DELAYED),
        Run(3, "cpu", param_tier=DISK, bias=False),
        Run(3, DISK, schedule="overlap"),
        Run(3, SOME, SMALL),
    ],
    3: [Run(2, SOME, SMALL, schedule="overlap"), Run(1, DISK, {}, "fp32", schedule=DELAYED, chained=True)],
}


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_of_disk_and_memory_are_planned(size: int, tmp_path: Path) -> None:
    trained(size, QUICK[size], tmp_path)


@pytest.mark.slow
@each("size", [1, 2, 3])
@each("stage", [0, 1, 2, 3])
def test_every_stage_tier_and_format(stage: int, size: int, tmp_path: Path) -> None:
    schedules = ["sync", "overlap", DELAYED]
    rows = product(["cpu", DISK, SOME], [{}, SMALL, WITH_MASTER])
    runs = [Run(stage, tier, formats, schedule=schedules[n % 3]) for n, (tier, formats) in enumerate(rows)]
    trained(size, runs[(stage + size) % 3 :: 3], tmp_path)


def drawn(seed: int, size: int) -> Run:
    """A run at random, of what there is on so many ranks."""
    draw = random.Random(seed)
    stage = draw.randrange(4)
    budgets = [f"cpu:{draw.randrange(1, 4000)}KB", DISK]
    tier = draw.choice(["device", "cpu", DISK, budgets, budgets, ["device:200KB", budgets[0], DISK]])
    param_tier = draw.choice(["device", DISK]) if stage == 3 else "device"
    schedules = ["sync"] if param_tier != "device" else ["sync", "overlap", DELAYED]
    state_format, dtype = draw.choice(["fp32", "bf16", "int8"]), draw.choice(["bf16", "bf16", "fp32"])
    master = draw.choice([None, "split16", "split8", "fp32", "none"]) if dtype == "bf16" else None
    formats = {"state_format": state_format, **({"master_format": master} if master else {})}
    schedule, wraps = draw.choice(schedules), size > 1 or stage > 0 or param_tier != "device"
    width, blocks, long = draw.choice([64, 96, 128]), draw.randrange(1, 5), draw.randrange(40, 130) * 128
    chained, bias = draw.random() < 0.5, param_tier == "device" and draw.random() < 0.5
    return Run(stage, tier, formats, dtype, schedule, param_tier, wraps, width, blocks, long, chained, bias)


@pytest.mark.slow
@each("size", [1, 2, 3])
def test_runs_at_random(size: int, tmp_path: Path) -> None:
    trained(size, [drawn(100 * size + number, size) for number in range(8 if size < 3 else 4)], tmp_path)


def words(act: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(ValueError, match="must be") as raised:
        act(*given, **named)
    return str(raised.value)


class TestRefused:
    """With the words of zk.Muon; what is said before the colon is how each was asked."""

    def test_a_ring_that_is_too_small(self, tmp_path: Path) -> None:
        small = zk.Nvme(tmp_path, ring_nbytes="1M")
        said = words(zk.Muon, [nn.Parameter(torch.ones(4, 4))], tier=small)
        assert said == words(zk.plan, "gpt2", optimizer="muon", tier=small, device="cpu")

    def test_blocks_that_two_matrices_would_share(self) -> None:
        model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(10, 6, bias=False)])})
        matrices, _ = zk.muon_groups(model, split={"blocks.0.weight": 2})
        opt = zk.Muon(matrices, state_format="int8")
        model["blocks"][0].weight.grad = torch.ones(6, 10)
        said = words(opt.step).partition(" in ")
        planned = words(zk.plan, model, optimizer="muon", whole=matrices, state_format="int8").partition(" in ")
        assert said[0] == planned[0] and "128 elements share a scale" in said[2] and "128 elements" in planned[2]

    @each("tier", ["cpu", DISK])
    def test_matrices_that_the_host_would_multiply(self, tier: str, tmp_path: Path) -> None:
        with played() as device:
            param = device.own(nn.Parameter(torch.ones(8, 8)))
            opt = zk.Muon([param], tier=zk.Nvme(tmp_path) if tier == DISK else tier, update="host")
            param.grad = torch.ones(8, 8)
            said = words(opt.step)
            opt.close()
        planned = words(zk.plan, "gpt2", optimizer="muon", tier="cpu", update="host")
        assert said.partition(": ")[2] == planned.partition(": ")[2]

    def test_the_cuts_of_stage_3_off_their_gpus(self) -> None:
        asked = {"optimizer": "muon", "stage": 3, "param_tier": "cpu", "tier": "cpu"}
        assert "'device' for matrices on GPUs, which exchange them" in words(zk.plan, "gpt2", world=2, **asked)
        assert zk.plan("gpt2", world=1, **asked) and zk.plan("gpt2", world=2, device="cpu", **asked)
        assert zk.plan("gpt2", optimizer="muon", stage=3, world=2, tier="cpu")

    def test_what_two_optimizers_would_each_fill(self) -> None:
        asked = {"optimizer": "muon", "tier": ["device:auto", "cpu"], "device_memory": "80GB"}
        assert "would each take what is free" in words(zk.plan, "gpt2", **asked)
        param_tier = ["device:1GB", "cpu"]
        both = {"stage": 3, "param_tier": param_tier, "tier": "cpu", "optimizer": "muon"}
        assert "some of these parameters on the device" in words(zk.plan, "gpt2", **both)


class TestAtRest:
    def test_off_a_device_the_host_multiplies(self) -> None:
        """In host memory, where the matrix in flight is then, and at a rate that no description has."""
        plan = zk.plan("gpt2", optimizer="muon", stage=3, param_tier="cpu", tier="cpu")
        on_host = zk.plan("gpt2", optimizer="muon", device="cpu")
        assert plan.muon is not None and on_host.muon is not None and plan.muon.dtype == on_host.muon.dtype
        assert {one.tier for one in plan.held if one.role == "iteration"} == {"cpu"}
        found = plan.predict("h200-pcie", tokens=[1024])
        assert not found.muon_flops and "Not timed: Newton-Schulz on the host" in " ".join(found._notes())
        assert "on the host, where parameters rest" in str(plan)

    def test_the_program_moves_what_the_plan_says(self) -> None:
        for asked in (
            {}, {"tier": ["cpu:200MB", DISK]}, {"state_format": "int8"}, {"stage": 3, "param_tier": DISK},
            {"world": 2, "stage": 2},
        ):  # fmt: skip
            plan = zk.plan("gpt2", optimizer="muon", **{"tier": DISK, "device": "cpu", **asked})
            program = step_program(plan, "sync", 4096)
            for lane in ("read", "write"):
                told = sum(op.nbytes for op in program.ops if op.lane == lane)
                assert told == pytest.approx(plan.moved(lane), rel=0.01), (asked, lane)


class TestAdvice:
    @each("model, memory, budget, rest_on_disk", [
        ("llama-2-7b", "55GB", "cpu:19GB", False), ("llama-3-8b", "58GB", "cpu:9GB", True),
    ])  # fmt: skip
    def test_a_cpu_fills_its_memory_first(self, model: str, memory: str, budget: str, rest_on_disk: bool) -> None:
        """Muon's matrices and AdamW's rest together; where one needs less than half, the other has what is left."""
        asked = {"device": "cpu", "device_memory": "1TB", "host_memory": memory, "disk": "1TB"}
        plan = zk.plan(model, optimizer="muon", **asked)
        (advised,) = plan.advised()
        assert not advised.missing and advised.tiers["nvme"]
        told = plan.advice()
        for folder in ("muon", "adamw"):  # two optimizers share none
            assert f'tier=["{budget}", zk.Nvme(path + "/{folder}")]' in told
        assert {one.tier for one in advised.placed if one.part.matrix is not None} == {"cpu", "nvme"}
        assert ("nvme" in {one.tier for one in advised.placed if one.part.matrix is None}) == rest_on_disk
        more = int(budget.removeprefix("cpu:").removesuffix("GB")) + 2
        too_much = replace(advised, recipe=replace(advised.recipe, budgets=(("cpu", more * 10**9),)))
        assert not has_room(less_reserve(too_much))

    def test_a_gpu_has_no_disk(self) -> None:
        """Until parameters rest off it, too."""
        asked = {"optimizer": "muon", "device_memory": "24GB", "host_memory": "40GB", "disk": "1TB"}
        told = zk.plan("llama-2-7b", **asked).advice()
        assert "zk.shard(model, stage=3, tier=" in told and "zk.Muon(matrices, tier=" in told
        fits = zk.plan("llama-2-7b", **{**asked, "device_memory": "48GB", "host_memory": "400GB"})
        (advised,) = fits.advised()
        assert advised.recipe.param_tier == "device" and advised.recipe.tier == "cpu" and advised.budgets
        assert {tier for tier, _ in advised.budgets} == {"device"} and not advised.missing


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    asked = ["plan", "--model", "gpt2", "--optimizer", "muon", "--device", "cpu", "--all"]
    assert main([*asked, "--tier", "cpu:200MB,nvme"]) == 0
    told = capsys.readouterr().out
    for says in (
        "state in host memory up to 0.200 GB, then on NVMe", "total on NVMe", "budgets of their own", "to the disk",
    ):  # fmt: skip
        assert says in told, told
    assert main([*asked, "--tier", "nvme", "--stage", "3", "--world", "2"]) == 0
    assert "total on NVMe" in capsys.readouterr().out
    on_gpu = [one if one != "cpu" else "cuda" for one in asked]
    assert main([*on_gpu, "--tier", "nvme"]) == 2
    assert "'device', 'cpu' or both, with budgets, for matrices on a GPU" in capsys.readouterr().err


def test_rings_are_of_who_has_state_on_the_disk() -> None:
    """Muon's alone, where what AdamW has fits in memory."""
    plan = zk.plan(Mixed(Run()), optimizer="muon", device="cpu", tier=["cpu:1MB", DISK])
    assert plan.roles["ring"] == 64 << 20
    assert zk.plan(Mixed(Run()), optimizer="muon", device="cpu", tier=DISK).roles["ring"] == 2 * (64 << 20)


def test_other_places_are_planned_with_the_ring_that_was_asked_for() -> None:
    """Not with one of 64 MiB; where nothing is on a disk the ring takes nothing."""
    asked = Recipe("adamw", tier="nvme", ring_nbytes=1 << 30, keep="nvme", keep_ring_nbytes=1 << 28)
    assert asked.placed("nvme", "device", "nvme").rings_nbytes("cuda", 1) == (1 << 30) + (1 << 28)
    assert asked.placed("cpu", "device", None).rings_nbytes("cuda", 1) == 0
