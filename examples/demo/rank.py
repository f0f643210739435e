"""One process of the third act, whose `main` is told ACT STEPS RANK PORT.

With port 0 it is alone and plain torch; else one rank of a stage of ZeRO, joined by gloo to the others; their store
is in the parent.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerokern as zk
from zerokern.comm import Group, group_on
from zerokern.core import native
from zerokern.core.env import usable_cpus

from ..contenders import CONTENDERS, Contender
from ..model import GPT, Shape
from ..text import Batches, read_text
from .act import Act, NotHereError
from .processes import emit, first_line, return_freed_memory, status_nbytes

WATCHED_STEP = 2  # the first that knows in which order units are gathered, and gathers ahead
PATIENCE = timedelta(minutes=5)  # of a busy machine's ranks for each other; one that died is known at once
ROLLUP = Path("/proc/self/smaps_rollup")


def pages_nbytes() -> int:
    """Memory of its own that this process really has, as the kernel counts its pages; 0 where it does not."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if not ROLLUP.exists():
        return 0
    return 1024 * next(int(line.split()[1]) for line in ROLLUP.read_text().splitlines() if "Anonymous:" in line)


def watched(module: nn.Module, look: Callable[[], None]) -> None:
    """Calls `look` whenever the module computes."""
    compute = module.forward

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        look()
        return compute(*inputs)

    module.forward = forward


class Seat:
    """One rank's part of the training."""

    def __init__(self, act: Act, rank: int, group: Group) -> None:
        self.act, self.rank, self.group = act, rank, group
        self.contender: Contender = CONTENDERS["exact-fp32" if group.size > 1 else "torch"]

    def build(self, shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT(shape)
        if self.group.size > 1:
            zk.shard(model, stage=self.act.stage)
        return model, self.contender.optimizer(model.parameters(), self.act.lr)

    def step(self, model: GPT, optimizer: torch.optim.Optimizer, batches: Batches) -> float:
        """Forward, backward and update on this rank's rows; the loss is that of all rows."""
        tokens, targets = (whole.chunk(self.group.size)[self.rank] for whole in batches.next())
        loss = model(tokens, targets)
        loss.backward()
        self.contender.step(optimizer)
        losses = self.group.exchange(loss.item())
        return sum(losses) / len(losses)

    def warm_up(self, batches: Batches) -> None:
        """Loads what is loaded lazily, connects the ranks, starts threads and makes their workspaces, on one layer."""
        model, optimizer = self.build(replace(self.act.shape, layers=1))
        for _ in range(WATCHED_STEP):
            self.step(model, optimizer, batches)
            optimizer.zero_grad()

    def train(self, text: torch.Tensor, steps: int) -> None:
        act = self.act
        batches = Batches(text, act.rows, act.shape.context, seed=0)
        base = pages_nbytes()
        model, optimizer = self.build(act.shape)
        gathered = [0]
        if self.group.size > 1:
            for block in model.blocks:
                watched(block, lambda: gathered.append(zk.measure(model).roles.get("gathered", 0)))
        began = time.perf_counter()
        for number in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = act.lr_at(number)
            start = time.perf_counter()
            loss = self.step(model, optimizer, batches)
            emit("step", loss=loss, seconds=time.perf_counter() - start)
            if number == WATCHED_STEP:
                pages = pages_nbytes() - base
                emit(
                    "held",
                    roles=zk.measure(model, optimizer).roles,
                    pages=pages,
                    gathered=max(gathered),
                )
            optimizer.zero_grad()
            late = act.is_over(number, time.perf_counter() - began)
            if number >= WATCHED_STEP and any(self.group.exchange(late)):
                return


def main(text: str, *numbers: str) -> None:
    act, (steps, rank, port) = Act.of_json(text), map(int, numbers)
    world = act.world if port else 1
    threads = max(1, usable_cpus() // world)
    torch.set_num_threads(threads)
    native.set_threads(threads)
    if port:
        try:
            store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=PATIENCE)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
        except RuntimeError as error:
            raise NotHereError(f"two processes cannot connect by gloo here: {first_line(error)}") from error
    return_freed_memory()
    seat = Seat(act, rank, group_on(None, "cpu"))
    source = read_text()
    seat.warm_up(Batches(source, act.rows, act.shape.context, seed=1))
    gc.collect()
    resident = status_nbytes("VmRSS")
    emit("ready", threads=threads)
    seat.train(source, steps)
    emit("end", peak=status_nbytes("VmHWM") - resident)
