"""Bytes that a rank really sends: what its process wrote, as the kernel counts it. gloo writes to sockets."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from worlds import World, built, ranked, step_and_zero

import zerokern as zk
from zerokern.examples.model import GPT, Shape

SHAPE = Shape(layers=3, width=128, context=32)
WARM, MEASURED = 2, 3
POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, fp32 reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def written() -> int:
    """Bytes that this process has written, to files or sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def moved_by_disks() -> dict[str, int]:
    """Bytes that this process has had read and written by disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def step(model: Callable, optimizer: torch.optim.Optimizer, seed: int, micros: int, hold: Callable | None) -> None:
    for micro in range(micros):
        words = torch.randint(256, (2, SHAPE.context + 1), generator=torch.Generator().manual_seed(seed * 10 + micro))
        with hold() if hold and micro < micros - 1 else contextlib.nullcontext():
            (model(words[:, :-1], words[:, 1:]) / micros).backward()
    step_and_zero(optimizer)


def per_step(model: Callable, optimizer: torch.optim.Optimizer, micros: int, hold: Callable | None) -> float:
    for number in range(WARM):
        step(model, optimizer, number, micros, hold)
    before = written()
    for number in range(MEASURED):
        step(model, optimizer, WARM + number, micros, hold)
    return (written() - before) / MEASURED


@ranked
def sent(world: World, rows: list[tuple], spoil: Callable[[], None] | None = None) -> dict[tuple, float]:
    """Bytes sent per step, in units of Ψ (all parameters in fp32) times what does not stay at home: (W - 1) / W.

    A row is (stage or "ddp", name of a policy, micro-steps, whether under no_sync).
    """
    start = built(lambda: GPT(SHAPE))
    if spoil:
        spoil()
    volume = 4 * sum(param.numel() for param in start.parameters()) * (world.size - 1) / world.size
    answers = {}
    for row in rows:
        stage, policy, micros, held = row
        model = copy.deepcopy(start)
        if stage == "ddp":
            wrapped: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
            hold = wrapped.no_sync
        else:
            wrapped = world.shard(model, stage=stage, mp_policy=POLICIES[policy])
            hold = holder(model)
        optimizer = zk.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        answers[row] = per_step(wrapped, optimizer, micros, hold if held else None) / volume
    return answers


def holder(model: nn.Module) -> Callable:
    return lambda: zk.no_sync(model)


def gathers_twice() -> None:
    """One hidden copy: what a witness must see."""
    from zerokern.comm.group import Group

    gather = Group.all_gather

    def again(self: Group, whole: Tensor, shard: Tensor | None = None) -> object:
        gather(self, whole, shard).wait()
        return gather(self, whole, shard)

    Group.all_gather = again
