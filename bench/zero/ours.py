"""zk.shard at stages 1, 2 and 3 with zk.AdamW, at its defaults: nothing is tuned."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk

from ..contest import Missing
from .job import HYPER, MAX_NORM
from .trainer import Candidate, Seat, Trainer, wirings

STAGES = (1, 2, 3)


def name_of(stage: int) -> str:
    return f"zk.shard stage {stage}"


NAMES = tuple(name_of(stage) for stage in STAGES)


def build(seat: Seat, stage: int) -> Trainer:
    model, mesh = seat.job.divided_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if seat.job.is_bf16 else None
    zk.shard(model, mesh=mesh, stage=stage, mp_policy=policy)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def candidates(seat: Seat) -> list[Candidate]:
    if not hasattr(zk, "shard"):
        raise Missing("this zerokern has no zk.shard")
    return [one for stage in STAGES for one in wirings(name_of(stage), functools.partial(build, seat, stage))]
