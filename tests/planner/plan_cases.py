"""Runs of zk.Muon beside zk.AdamW in any stage, tier and format, and what a plan of each says, side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.api import sharding_of

RING = 2 << 20  # the least that Muon takes: slots of 256 KiB
STATES = ("remainder", "master", "exp_avg", "exp_avg_sq", "momentum_buffer")
BESIDE = ("parameters", "gradients", "host parameters", "host gradients", "buffers", "ring")
DISK = "nvme"
Said = str | list[str]


class Run(NamedTuple):
    """What is trained, and how. `tier`: a word, or several with budgets. `wraps`: by `zk.shard`."""

    stage: int = 0
    tier: Said = "device"
    formats: Mapping[str, str] = {}
    dtype: str = "bf16"
    schedule: Any = "sync"
    param_tier: Said = "device"
    wraps: bool = True
    width: int = 96
    blocks: int = 3
    long: int = 12_000
    chained: bool = False
    bias: bool = True


class Mixed(nn.Module):
    """Matrices of many sizes, two of them with state in several records, one fused; and what is none."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        width, dtype = run.width, {"bf16": torch.bfloat16, "fp32": torch.float32}[run.dtype]
        kind = {"bias": run.bias, "dtype": dtype}
        self.enter = nn.Embedding(301, width, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width, **kind), nn.Linear(3 * width, width, **kind))
            for _ in range(run.blocks)
        )
        self.long = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, run.long, **kind), nn.Linear(run.long, width, **kind))]
        )
        self.leave = nn.Linear(width, 67, **kind)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in (*self.blocks, *self.long):
            x = x + block(x)
        return self.leave(x)


def tiers(said: Said, folder: Path) -> Any:
    words = [said] if isinstance(said, str) else said
    made = [zk.Nvme(folder, ring_nbytes=RING) if word == DISK else word for word in words]
    return made if len(made) > 1 else made[0]


def io_of_process() -> dict[str, int]:
    """Bytes that this process had the disk read and write, as the kernel counts them."""
    lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def by_tier(memory: Any, roles: tuple[str, ...]) -> dict[tuple[str, str], int]:
    """Bytes by role and tier; of a CPU's, host memory and the device are one."""
    found: dict[tuple[str, str], int] = {}
    for one in memory.held:
        if one.role in roles:
            key = one.role, "disk" if one.tier == DISK else "memory"
            found[key] = found.get(key, 0) + one.nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


class Seen(NamedTuple):
    """Of one rank: what was planned and found. `disk`: bytes of state that a step reads and writes, as the optimizers
    count them; `kernel`: of all, as the kernel does."""

    planned: dict
    held: dict
    planned_disk: dict[str, int]
    disk: dict[str, int]
    planned_kernel: dict[str, int]
    kernel: dict[str, int]
    rank: int
    pinned: tuple[int, int]
    statistics: dict[str, int]
    where: dict[str, str]
    planned_where: dict[str, str]


def all_seen(rank: int, runs: list[Run], folder: str) -> list[Seen]:
    """Of each run."""
    return [seen(rank, run, Path(folder) / f"{number} {rank}") for number, run in enumerate(runs)]


def seen(rank: int, run: Run, here: Path) -> Seen:
    """Trains, and compares with the plan."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = Mixed(run)
    here.mkdir(parents=True, exist_ok=True)
    split = {"blocks.0.0.weight": 3} if run.formats.get("state_format") != "int8" or run.width % 128 == 0 else {}
    groups = zk.muon_groups(model, split=split)
    shard: dict[str, Any] = {"stage": run.stage, "bucket_bytes": 1 << 17}
    if run.dtype == "fp32" and run.stage:
        shard["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    asked = {"tier": tiers(run.tier, here / "plan"), "schedule": run.schedule, **run.formats}
    plan = zk.plan(
        model, world=world, optimizer="muon", whole=groups[0], param_tier=tiers(run.param_tier, here / "plan"),
        device="cpu", **shard, **asked,
    )  # fmt: skip
    if run.wraps:
        shard |= {"whole": groups[0] if run.stage in (1, 2) else None}
        shard |= {"tier": tiers(run.param_tier, here / "parameters")} if run.param_tier != "device" else {}
        zk.shard(model, **shard)
    kinds = (zk.Muon, "muon"), (zk.AdamW, "adamw")
    opts = [
        kind(some, lr=1e-3, **{**asked, "tier": tiers(run.tier, here / name)})
        for (kind, name), some in zip(kinds, groups, strict=True)
    ]
    steps: list[Any] = [zk.ChainedOptimizer(opts, max_grad_norm=1.0)] if run.chained else opts

    def step() -> None:
        for opt in steps:
            opt.step()
        for opt in opts:
            opt.flush()

    def backward() -> None:
        for opt in steps:
            opt.zero_grad()
        model(torch.arange(7) + rank).float().square().mean().backward()

    resting = [sharding_of(model).rests] if run.wraps and run.param_tier != "device" else []
    for rests in resting:
        rests.leaving_nbytes = 0  # nothing waits in memory for its next user
    for _ in range(2):
        backward()
        step()
    for rests in resting:
        rests.drain()
    if world > 1:
        dist.barrier()
    disks = [opt.holdings.disk.tier.swap for opt in opts if opt.holdings.disk is not None and opt.holdings.disk.is_open]
    before, kernel = [disk.stats() for disk in disks], io_of_process()
    backward()
    step()
    moved = {
        lane: sum(disk.stats()[f"{way}_nbytes"] - old[f"{way}_nbytes"] for disk, old in zip(disks, before, strict=True))
        for lane, way in (("read", "read"), ("write", "written"))
    }
    for rests in resting:
        rests.drain()
    after = io_of_process()
    counted = {
        "read": after["read_bytes"] - kernel["read_bytes"],
        "write": after["write_bytes"] - kernel["write_bytes"],
    }
    backward()
    measured = zk.measure(model, opts)
    roles = (*STATES, *BESIDE)
    statistics = dict.fromkeys(("device", "cpu", "disk"), 0)
    for opt in opts:
        for name in statistics:
            statistics[name] += int(opt.statistics()[f"state_bytes/{name}"])
    disk = {"read": 0, "write": 0}
    for move in plan.moves:
        if move.role in (*STATES, "padding") and move.lane in disk:
            disk[move.lane] += move.nbytes
    where, planned_where = places(model, opts, plan, rank)
    return Seen(
        by_tier(plan, roles), by_tier(measured, roles), disk, moved, {lane: plan.moved(lane) for lane in moved},
        counted, plan.buckets.rank,
        (plan.pinned, measured.pinned), statistics, where, planned_where,
    )  # fmt: skip


def places(model: nn.Module, opts: Any, plan: Any, rank: int) -> tuple[dict[str, str], dict[str, str]]:
    """Where the state of each parameter is that has some here, and where it was planned to be."""
    names = {id(param): name for name, param in model.named_parameters()}
    found = {}
    for opt in opts:
        shards = opt.holdings.shards
        held = opt.holdings.held
        listed = [param for group in opt.param_groups for param in group["params"]]
        pieces = shards.updated if shards.shards and not shards.shown.in_place else listed
        for param, piece in zip(listed, pieces, strict=True):
            entry = held.get(piece)
            if isinstance(entry, dict) and piece.numel():
                found[names[id(param)]] = "disk" if "on_disk" in entry else "memory"
    turns = [names[id(param)] for opt in opts for group in opt.param_groups for param in group["params"]]
    planned = {turns[one.part.turn]: "disk" if one.tier == DISK else "memory" for one in plan.placed}
    return found, planned
