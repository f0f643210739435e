"""zk.shard at stage 3 with parameters and state on the device, in host memory and on disk, at its defaults.

Horizontal: a plain loop over micro-batches under zk.no_sync. Vertical: zk.shard(micro=M), one call for all of them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.io.tier import below

from ..contest import Missing
from ..zero.job import HYPER, MAX_NORM
from ..zero.trainer import Candidate, Seat, Trainer, wirings
from .job import accumulating

RESIDENT, CPU, NVME = "zk resident", "zk cpu", "zk nvme"
VERTICAL = ", vertical"
OFFLOADED = (CPU, NVME)
NAMES = tuple(name + order for name in (RESIDENT, *OFFLOADED) for order in ("", VERTICAL))
STAGE = 3
_numbers = itertools.count()
SCHEDULES = {"overlap": "overlap", "sync": "sync"}  # the same bits; which is faster depends on the machine


def order_of(name: str) -> str:
    """
    >>> order_of("zk cpu, vertical"), order_of("zk cpu")
    ('vertical', 'horizontal')
    """
    return "vertical" if name.endswith(VERTICAL) else "horizontal"


def is_resident(name: str) -> bool:
    return name.removesuffix(VERTICAL) == RESIDENT


def resident_of(name: str) -> str:
    """Ours with everything on the device that sums in the same order, whose bits are therefore to be met.

    >>> resident_of("zk nvme, vertical"), resident_of("zk cpu")
    ('zk resident, vertical', 'zk resident')
    """
    return RESIDENT + (VERTICAL if order_of(name) == "vertical" else "")


def tier_of(name: str, seat: Seat) -> Any:
    """Where parameters and state of a contender rest; on disk each that is built has a folder of its own."""
    kind = name.removesuffix(VERTICAL)
    if kind == NVME:
        own = f"{name.replace(', ', '-').replace(' ', '-')}-{next(_numbers)}"
        return below(zk.Nvme(seat.job.folder), own, f"rank-{seat.rank}")
    return {RESIDENT: "device", CPU: "cpu"}[kind]


def how(seat: Seat, name: str) -> dict[str, Any]:
    """What zk.shard is told besides the stage, if it knows the words; else the contender is missing."""
    told: dict[str, Any] = {}
    if not is_resident(name):
        told["tier"] = tier_of(name, seat)
    if order_of(name) == "vertical":
        told["micro"] = seat.job.micro
    known = inspect.signature(zk.shard).parameters
    strange = [word for word in told if word not in known]
    if strange:
        raise Missing(f"zk.shard of this zerokern has no {' and no '.join(strange)}")
    return told


def build(seat: Seat, name: str, schedule: str) -> Trainer:
    told = how(seat, name)
    model = seat.job.build_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if seat.job.is_bf16 else None
    zk.shard(model, stage=STAGE, mp_policy=policy, **told)
    optimizer: Any = zk.AdamW(
        model.parameters(), max_grad_norm=MAX_NORM, tier=told.get("tier", "device"), schedule=schedule, **HYPER
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def vertical(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        update()
        return loss.detach()

    loop = accumulating(model, seat.job.micro, update, functools.partial(zk.no_sync, model))
    step = vertical if order_of(name) == "vertical" else loop
    return Trainer(step, finish=optimizer.flush)


def candidates(seat: Seat, name: str) -> list[Candidate]:
    schedules = {"sync": "sync"} if is_resident(name) else SCHEDULES
    return wirings(name, functools.partial(build, seat, name), schedule=schedules)


def names_of(seat: Seat) -> list[str]:
    """Who takes part: with one micro-batch there is no order, and without a folder no disk."""
    return [
        name
        for name in NAMES
        if (seat.job.micro > 1 or order_of(name) == "horizontal") and (seat.job.folder or not name.startswith(NVME))
    ]
