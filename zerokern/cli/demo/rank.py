"""One process of the third act: `python -m zerokern.cli.demo.rank SPEC RANK PORT`.

With port 0 it is alone and plain torch; else one rank of a stage of ZeRO, joined by gloo to the others; their store
is in the parent. Each event is one line of JSON on stdout.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerokern as zk
from zerokern.cli.demo.child import emit, return_freed_memory, status_nbytes
from zerokern.comm import Group
from zerokern.core import native
from zerokern.core.env import usable_cpus
from zerokern.examples.contenders import CONTENDERS, Contender
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

WATCHED_STEP = 2  # the first that knows in which order units are gathered, and gathers ahead
PATIENCE = timedelta(seconds=60)
ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class Spec:
    """What all ranks are told."""

    world: int
    stage: int
    layers: int
    width: int
    context: int
    rows: int
    steps: int
    warmup: float
    lr: float
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


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

    def __init__(self, spec: Spec, rank: int, group: Group) -> None:
        self.spec, self.rank, self.group = spec, rank, group
        self.contender: Contender = CONTENDERS["exact-fp32" if group.size > 1 else "torch"]

    def build(self, shape: Shape) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT(shape)
        if self.group.size > 1:
            zk.shard(model, stage=self.spec.stage)
        return model, self.contender.optimizer(model.parameters(), self.spec.lr)

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
        model, optimizer = self.build(Shape(1, self.spec.width, self.spec.context))
        for _ in range(WATCHED_STEP):
            self.step(model, optimizer, batches)
            optimizer.zero_grad()

    def train(self, text: torch.Tensor) -> None:
        spec = self.spec
        batches = Batches(text, spec.rows, spec.context, seed=0)
        base = pages_nbytes()
        model, optimizer = self.build(Shape(spec.layers, spec.width, spec.context))
        gathered = [0]
        if self.group.size > 1:
            for block in model.blocks:
                watched(block, lambda: gathered.append(zk.measure(model).roles.get("gathered", 0)))
        began = time.perf_counter()
        for number in range(1, spec.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * min(1.0, number / spec.warmup)
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
            late = time.perf_counter() - began > spec.seconds
            if number >= WATCHED_STEP and any(self.group.exchange(late)):
                return


def main(text: str, rank_text: str, port_text: str) -> None:
    spec, rank, port = Spec(**json.loads(text)), int(rank_text), int(port_text)
    world = spec.world if port else 1
    threads = max(1, usable_cpus() // world)
    torch.set_num_threads(threads)
    native.set_threads(threads)
    if port:
        store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=PATIENCE)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return_freed_memory()
    seat = Seat(spec, rank, Group.of(None, "cpu"))
    source = read_text()
    seat.warm_up(Batches(source, spec.rows, spec.context, seed=1))
    gc.collect()
    resident = status_nbytes("VmRSS")
    emit("ready", threads=threads)
    seat.train(source)
    emit("end", peak=status_nbytes("VmHWM") - resident)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the threads of gloo may wait for ranks that are gone
    sys.stdout.flush()
    os._exit(0)
