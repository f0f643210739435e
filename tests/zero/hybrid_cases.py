"""Meshes of two dimensions: programs that ranks run on them, beside one process, one dimension, and float64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loss_cases
import torch
from loss_cases import SHAPE, Plan, Run, clipping, in_float64, rms, sharded, under_ddp, windows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from wire_cases import written
from worlds import World, built, ranked, step_and_zero
from zero_cases import mse

import zerokern as zk
from zerokern.examples.model import GPT

NAMES = ("dp_replicate", "dp_shard")


def laid_out(world: World, sizes: Sequence[int], names: Sequence[str] = NAMES) -> World:
    """The same ranks, on a mesh."""
    return dataclasses.replace(world, layout=init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names)))


def flattened(world: World) -> World:
    """cp 2 x dp 2 as one dimension, of a mesh that has more."""
    mesh = init_device_mesh("cpu", (1, 2, world.size // 2), mesh_dim_names=("pp", "dp", "cp"))
    return dataclasses.replace(world, layout=mesh["dp", "cp"]._flatten("dp_cp"))


def in_one_process(world: World, plan: Plan, start: GPT) -> Run:
    """All that the ranks have, one after the other, by torch; each rank does the same."""
    model, steps = copy.deepcopy(start), itertools.count()

    def of_all() -> None:
        model.zero_grad()
        step = next(steps)
        for micro, rank in itertools.product(range(plan.accumulate), range(world.size)):
            (model(*windows(plan, step, micro, rank)) / plan.accumulate).backward()
        for param in model.parameters():  # not the loss: a sixth of that is off by as much in all gradients
            assert param.grad is not None
            param.grad /= world.size

    return loss_cases.train(plan, world.rank, model, model, clipping(model.parameters()), finish=of_all)


def start_of(seed: int) -> GPT:
    return built(lambda: GPT(SHAPE), seed=seed)


@ranked
def compare(world: World, plan: Plan, sizes: tuple[int, int]) -> list[str]:
    """What is wrong on this rank, of each stage on this mesh: every step against float64, as DDP is."""
    plan = dataclasses.replace(plan, every=True)
    start = start_of(plan.seed)
    exact, ddp = in_float64(world, plan, start), under_ddp(world, plan, start)
    two = laid_out(world, sizes)
    runs = {f"stage {stage} on {sizes}": sharded(two, plan, start, stage) for stage in plan.stages}
    runs["one process"] = in_one_process(world, plan, start)
    runs[f"stage {plan.stages[-1]} on one dimension"] = sharded(world, plan, start, plan.stages[-1])
    if world.size % 2 == 0:
        runs["flattened dp x cp"] = sharded(flattened(world), plan, start, plan.stages[-1])
    for run in (exact, ddp, *runs.values()):
        run.losses = (world.total(torch.tensor(run.losses, dtype=torch.float64)) / world.size).tolist()
    return [fault for name, run in runs.items() for fault in faults(name, run, ddp, exact)]


def faults(name: str, run: Run, ddp: Run, exact: Run) -> list[str]:
    """No further from float64 than twice DDP's error, at each step for tensors, over all steps for numbers."""
    found = []
    for what in ("losses", "norms"):
        mine, theirs = (rms(torch.tensor(getattr(one, what)), torch.tensor(getattr(exact, what))) for one in (run, ddp))
        if not mine <= 2 * theirs + 1e-7:
            found.append(f"{name}: {what} are off by {mine:.3g}, DDP's by {theirs:.3g}")
    for what in ("every_grad", "every_param"):
        for step, values in enumerate(zip(*(getattr(one, what) for one in (run, ddp, exact)), strict=True)):
            mine, theirs = rms(values[0], values[2]), rms(values[1], values[2])
            if not mine <= 2 * theirs + 1e-9:
                found.append(f"{name}: {what} of step {step} are off by {mine:.3g}, DDP's by {theirs:.3g}")
    return found


def train(world: World, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        mse(model, step, world).backward()
        step_and_zero(optimizer)


@ranked
def alike(world: World, sizes: tuple[int, int], steps: int, stage: int, dtype: torch.dtype | None) -> list[bytes]:
    """After each step what this rank has of all parameters and their state, to the bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    two = laid_out(world, sizes)
    policy = None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype)
    model = two.shard(start_of(0), stage=stage, mp_policy=policy, bucket_bytes=50_000)
    optimizer = clipping(model.parameters())
    seen = []
    for step in range(steps):
        model(*windows(Plan(), step, 0, world.rank)).backward()
        step_and_zero(optimizer)
        seen.append(own_bytes(model, optimizer))
    return seen


def own_bytes(model: nn.Module, optimizer: Any) -> bytes:
    """A digest of what lies here."""
    import hashlib

    digest = hashlib.sha256()
    for param in model.parameters():
        for one in (param, *(optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))):
            local = one.local if hasattr(one, "local") else one.detach()
            digest.update(local.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


@ranked
def sent(world: World, sizes: tuple[int, int], stages: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    """Bytes that this rank sends in a step, in units of all parameters: counted by us along each dimension, and by the
    kernel over both."""
    two = laid_out(world, sizes)
    start = start_of(0)
    nbytes = 4 * sum(param.numel() for param in start.parameters())
    found = {}
    for stage in stages:
        model = two.shard(copy.deepcopy(start), stage=stage, bucket_bytes=1 << 20)  # spans that are not sent whole
        optimizer = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        group = zk.api.sharding_of(model).group
        before: tuple[float, ...] = ()
        for step in range(5):
            if step == 2:
                before = traffic_of(group)
            model(*windows(Plan(), step, 0, world.rank)).backward()
            step_and_zero(optimizer)
        along, across, wire = (now - then for now, then in zip(traffic_of(group), before, strict=True))
        found[stage] = (along / 3 / nbytes, across / 3 / nbytes, wire / 3 / nbytes)
    return found


def traffic_of(group: Any) -> tuple[float, float, float]:
    replicas = getattr(group, "replicas", None)
    return group.traffic.total(), 0 if replicas is None else replicas.traffic.total(), written()


def folder_nbytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
