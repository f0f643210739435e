"""Training with exact state on the host and "overlap" for as long as there is time: what grows is a leak.

Batches are of all sizes, so that allocations are; each so many steps memory of the GPU and of the host is noted.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from ...offload import device
from ...offload.memory import resident_nbytes
from .. import host_rate
from ..report import Desk
from . import zero

TOY_STEPS, NOTED_EVERY, LEFT_S = 12, 50, 5.0
SETTLED = 2  # notes before what an allocator keeps has been seen


def run(desk: Desk) -> None:
    rehearse = desk.settings.rehearse
    host_rate.tell(desk, "soak")
    dist.init_process_group("gloo" if rehearse else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _train(desk)
    finally:
        dist.destroy_process_group()


def _train(desk: Desk) -> None:
    rehearse = desk.settings.rehearse
    stage = device.Stage(desk.settings.device, zero.TOY if rehearse else zero.SHAPE)
    trainer = device.ours(stage, device.OVERLAP, "exact")
    batch = stage.batch(zero.TOY_TOKENS if rehearse else zero.TOKENS)
    notes: list[dict[str, float]] = []
    losses: list[float] = []
    every, began, number = (3 if rehearse else NOTED_EVERY), time.monotonic(), 0
    while number < TOY_STEPS if rehearse else desk.budget.left > LEFT_S:
        loss = trainer.step(*part_of(batch, number))
        number += 1
        if number % every == 0:
            trainer.settle()
            losses.append(loss.item())
            notes.append(noted(stage))
    trainer.settle()
    desk.say(f"  {'rehearsed' if rehearse else f'{number} steps in {time.monotonic() - began:.0f} s'}")
    if not all(map(math.isfinite, losses)):
        desk.could_not("soak", f"a loss is not finite after {number} steps")
        return
    if len(notes) <= SETTLED:
        desk.could_not("soak.grown", f"{number} steps are too few")
        return
    grown = max(notes[-1][kind] - notes[SETTLED - 1][kind] for kind in ("device", "host"))
    desk.fact("soak: GB by so many steps, and losses", "rehearsed" if rehearse else [every, notes, losses])
    desk.figure("soak.grown", max(0.0, grown), of=f"{number} steps")


def part_of(batch: tuple[torch.Tensor, torch.Tensor], number: int) -> list[torch.Tensor]:
    """Another number of rows and tokens in each step."""
    rows, length = batch[0].shape
    cut = slice(1 + 5 * number % rows), slice(length - 17 * number % (length // 2))
    return [one[cut].contiguous() for one in batch]


def noted(stage: device.Stage) -> dict[str, float]:
    on_gpu = stage.device.type == "cuda"
    return {
        "device": torch.cuda.memory_allocated() / 1e9 if on_gpu else 0.0,
        "reserved": torch.cuda.memory_reserved() / 1e9 if on_gpu else 0.0,
        "host": resident_nbytes() / 1e9,
    }
