"""The bytes of a step with everything on disk, moved and nothing else: how fast this disk allows a step to be.

Parameters are read in forward and again in backward, then the state of each chunk is read and written, in the
chunks and through the engine that training uses, by all ranks at once.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerokern as zk
from zerokern.examples.model import GPT
from zerokern.memory import Arena

from ..zero.trainer import Candidate, Seat, Trainer, wirings
from .job import InfinityJob
from .ours import STAGE

NAME = "disk alone"
CHUNK_NBYTES = 8 << 20
SLOTS = 8
MIB, PAGE = 1 << 20, 4096


@dataclass(frozen=True)
class Traffic:
    """Bytes per parameter and step: what is only read, and what is read and written."""

    read: float
    both: float

    @property
    def up(self) -> float:
        return self.read + self.both

    @property
    def down(self) -> float:
        return self.both


def traffic(job: InfinityJob, horizontal: bool = False) -> Traffic:
    """What zk.plan says of a step with everything on disk: a pass over the parameters, or one for each micro-batch.

    >>> found = traffic(InfinityJob("100M", "bf16", 1, 2))
    >>> round(found.up, 1), round(found.down, 1)
    (13.9, 12.0)
    """
    with torch.device("meta"):
        model = GPT(job.shape)
    plan = zk.plan(
        model,
        stage=STAGE,
        world=job.ranks,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) if job.is_bf16 else None,
        tier="nvme",
        param_tier="nvme",
        schedule="overlap",
        accumulate=job.micro if horizontal else 1,
        device="cpu",
    )
    share = job.numel / job.ranks
    return Traffic((plan.moved("read") - plan.moved("write")) / share, plan.moved("write") / share)


def sizes(nbytes: float) -> list[int]:
    """Of the chunks of so many bytes, in whole pages.

    >>> sizes(20e6)
    [8388608, 8388608, 3223552]
    """
    pages = max(1, round(nbytes / PAGE)) * PAGE
    return [min(CHUNK_NBYTES, pages - at) for at in range(0, pages, CHUNK_NBYTES)]


class DiskAlone:
    """One rank's share of the bytes."""

    def __init__(self, seat: Seat) -> None:
        job = seat.job
        asked, share = traffic(job), job.numel / job.ranks
        moved = {"read": sizes(asked.read * share), "both": sizes(asked.both * share)}
        self.moves = [(f"{kind}/{i}", nbytes) for kind, each in moved.items() for i, nbytes in enumerate(each)]
        self.arena = Arena(SLOTS * CHUNK_NBYTES)
        self.leases = [self.arena.lease(CHUNK_NBYTES, NAME) for _ in range(SLOTS)]
        self.tensors = [lease.tensor() for lease in self.leases]
        folder = Path(job.folder) / NAME.replace(" ", "-") / str(seat.rank)
        budget = sum(nbytes for _, nbytes in self.moves) + len(self.moves) * PAGE
        self.store = zk.io.Store(folder, budget=budget, arena=self.arena)
        for tensor in self.tensors:
            tensor.fill_(seat.rank + 1)
        for key, nbytes in self.moves:
            self.store.put(key, self.tensors[0][:nbytes]).wait()

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        before: list[zk.io.Ticket | None] = [None] * SLOTS
        for (key, nbytes), slot in zip(self.moves, itertools.cycle(range(SLOTS)), strict=False):
            if (ticket := before[slot]) is not None:
                ticket.wait()
            target = self.tensors[slot][:nbytes]
            found = self.store.get(key, target)
            before[slot] = self.store.put(key, target, after=found) if key.startswith("both") else found
        for ticket in before:
            if ticket is not None:
                ticket.wait()
        return torch.zeros(())

    def close(self) -> None:
        self.store.close()
        for lease in self.leases:
            lease.release()


def build(seat: Seat, chunks: int) -> Trainer:
    made = DiskAlone(seat)
    return Trainer(made.step, close=made.close)


def candidates(seat: Seat) -> list[Candidate]:
    return wirings(NAME, functools.partial(build, seat), chunks={f"chunks of {CHUNK_NBYTES // MIB} MiB": CHUNK_NBYTES})
