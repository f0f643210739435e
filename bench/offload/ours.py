"""zk.shard with zk.AdamW(tier="cpu") in each schedule, at its defaults: nothing is tuned. And without any offload."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk

from ..zero.job import HYPER, MAX_NORM
from ..zero.trainer import Candidate, Seat, Trainer, wirings

SYNC, OVERLAP, DELAYED = "zk sync", "zk overlap", "zk delayed"
NAMES = (SYNC, OVERLAP, DELAYED)
RESIDENT = "no offload"


def keywords(name: str) -> dict[str, Any]:
    """What zk.AdamW is told."""
    if name == RESIDENT:
        return {}
    return {"tier": "cpu", "schedule": {SYNC: "sync", OVERLAP: "overlap", DELAYED: zk.Delayed(after=0)}[name]}


def settle(optimizer: Any, name: str) -> None:
    """Waits for the update under way, so that nobody's turn has work of another's in it.

    A flush would publish what Delayed keeps for the next step, which changes what it trains: its state waits as well.
    """
    if name == OVERLAP:
        optimizer.flush()
    elif name == DELAYED:
        optimizer.state_dict()


def build(seat: Seat, name: str) -> Trainer:
    model = seat.job.build_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if seat.job.is_bf16 else None
    zk.shard(model, stage=seat.job.stage, mp_policy=policy)
    optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER, **keywords(name))

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, finish=functools.partial(settle, optimizer, name))


def candidates(seat: Seat) -> list[Candidate]:
    return [one for name in NAMES for one in wirings(name, functools.partial(build, seat, name))]


def without_offload(seat: Seat) -> list[Candidate]:
    return wirings(RESIDENT, functools.partial(build, seat, RESIDENT))
