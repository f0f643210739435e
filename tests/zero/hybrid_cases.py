"""Meshes of two dimensions: programs that ranks run on them, beside one process, one dimension, and float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from loss_cases import LR, NORM, SHAPE, Plan, Wide, groups, rms, windows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from wire_cases import written
from worlds import World, built, full, ranked, step_and_zero

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


def whole_gradients(model: nn.Module) -> Tensor:
    """All elements of all gradients, in float64."""
    found = []
    for param in model.parameters():
        grad: Any = param.grad
        found.append(grad.whole(grad) if getattr(grad, "whole", None) else grad)
    return torch.cat([grad.detach().double().flatten() for grad in found])


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for _, value in sorted(values.items())])


@dataclasses.dataclass
class Track:
    """What a run was after each step."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    grads: list[Tensor] = dataclasses.field(default_factory=list)
    params: list[Tensor] = dataclasses.field(default_factory=list)


def track(
    world: World,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    params: Callable[[], dict[str, Tensor]],
    *,
    seed: int,
    forward: Callable | None = None,
    holds: Callable = contextlib.nullcontext,
    finish: Callable[[], None] = lambda: None,
    scale: float = 1.0,
) -> Track:
    run = Track()
    for step in range(plan.steps):
        total = 0.0
        for micro in range(plan.accumulate):
            held = plan.no_sync and micro < plan.accumulate - 1
            with holds() if held else contextlib.nullcontext():
                loss = (forward or model)(*windows(plan, step + 1000 * seed, micro, world.rank)) / plan.accumulate
                (loss * scale).backward()
            total += loss.item()
        finish()
        grads = whole_gradients(model)
        optimizer.step()
        run.losses.append(world.mean(total))
        run.norms.append(float(getattr(optimizer, "grad_norm", math.nan)))
        run.grads.append(grads)
        run.params.append(flat(params()))
        optimizer.zero_grad()
    return run


def sharded(world: World, plan: Plan, start: GPT, stage: int, seed: int, reduce: str = "mean") -> Track:
    model = world.shard(copy.deepcopy(start), stage=stage, bucket_bytes=plan.bucket_bytes, reduce=reduce)
    optimizer = zk.AdamW(groups(model.parameters()), lr=LR, max_grad_norm=NORM)
    scale = 1.0 if reduce == "mean" else 1.0 / world.size
    return track(
        world, plan, model, optimizer, lambda: full(model), seed=seed, holds=lambda: zk.no_sync(model), scale=scale
    )


def in_one_process(world: World, plan: Plan, start: GPT, seed: int) -> Track:
    """All that the ranks have, one after the other, by torch; each rank does the same."""
    model = copy.deepcopy(start)
    optimizer = zk.AdamW(groups(model.parameters()), lr=LR, max_grad_norm=NORM)

    def others() -> None:
        for param in model.parameters():
            param.grad = None
        for step_of in range(plan.accumulate):
            for rank in range(world.size):
                loss = model(*windows(plan, others.step + 1000 * seed, step_of, rank))  # type: ignore[attr-defined]
                (loss / plan.accumulate).backward()
        for param in model.parameters():  # not the loss: a sixth of that is off by as much in all gradients
            assert param.grad is not None
            param.grad /= world.size
        others.step += 1  # type: ignore[attr-defined]

    others.step = 0  # type: ignore[attr-defined]
    return track(world, plan, model, optimizer, lambda: dict(model.named_parameters()), seed=seed, finish=others)


def under_ddp(world: World, plan: Plan, start: GPT, seed: int) -> Track:
    model = copy.deepcopy(start)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = zk.AdamW(groups(model.parameters()), lr=LR, max_grad_norm=NORM)
    params = lambda: dict(model.named_parameters())  # noqa: E731
    return track(world, plan, model, optimizer, params, seed=seed, forward=wrapped, holds=wrapped.no_sync)


def in_float64(world: World, plan: Plan, start: GPT, seed: int) -> Track:
    model = Wide(start)
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=LR)

    def finish() -> None:
        world.average_gradients(model.parameters())

    def clipped(*arguments: Any) -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))

    norms: list[float] = []
    optimizer.register_step_pre_hook(clipped)
    run = track(world, plan, model, optimizer, lambda: dict(model.gpt.named_parameters()), seed=seed, finish=finish)
    run.norms = norms
    return run


def start_of(seed: int) -> GPT:
    return built(lambda: GPT(SHAPE), seed=seed)


@ranked
def compare(world: World, plan: Plan, seed: int, sizes: tuple[int, int], reduce: str = "mean") -> list[str]:
    """What is wrong on this rank, of each stage on this mesh: every step against float64, as DDP is."""
    start = start_of(seed)
    exact, ddp = in_float64(world, plan, start, seed), under_ddp(world, plan, start, seed)
    two = laid_out(world, sizes)
    runs = {f"stage {stage} on {sizes}": sharded(two, plan, start, stage, seed, reduce) for stage in plan.stages}
    runs["one process"] = in_one_process(world, plan, start, seed)
    runs[f"stage {plan.stages[-1]} on one dimension"] = sharded(world, plan, start, plan.stages[-1], seed, reduce)
    if world.size % 2 == 0:
        runs["flattened dp x cp"] = sharded(flattened(world), plan, start, plan.stages[-1], seed, reduce)
    return [fault for name, run in runs.items() for fault in faults(name, run, ddp, exact)]


def faults(name: str, run: Track, ddp: Track, exact: Track) -> list[str]:
    """No further from float64 than twice DDP's error, at each step for tensors, over all steps for numbers."""
    found = []
    for what in ("losses", "norms"):
        mine, theirs = (rms(torch.tensor(getattr(one, what)), torch.tensor(getattr(exact, what))) for one in (run, ddp))
        if not mine <= 2 * theirs + 1e-7:
            found.append(f"{name}: {what} are off by {mine:.3g}, DDP's by {theirs:.3g}")
    for what in ("grads", "params"):
        for step, values in enumerate(zip(*(getattr(one, what) for one in (run, ddp, exact)), strict=True)):
            mine, theirs = rms(values[0], values[2]), rms(values[1], values[2])
            if not mine <= 2 * theirs + 1e-9:
                found.append(f"{name}: {what} of step {step} are off by {mine:.3g}, DDP's by {theirs:.3g}")
    return found


@ranked
def alike(world: World, sizes: tuple[int, int], steps: int, stage: int, dtype: torch.dtype | None) -> list[bytes]:
    """After each step what this rank has of all parameters and their state, to the bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    two = laid_out(world, sizes)
    policy = None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype)
    model = two.shard(start_of(0), stage=stage, mp_policy=policy, bucket_bytes=50_000)
    optimizer = zk.AdamW(groups(model.parameters()), lr=LR, max_grad_norm=NORM)
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
