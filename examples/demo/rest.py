"""One training of the fourth act, in a process of its own, whose `main` is told ACT FOLDER.

With FOLDER parameters and state rest on disk and the act's cap on memory holds, that of `child.py`; where it has none
yet, two steps tell what it would have to leave. With "" both rest in memory and nothing is capped.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerokern as zk

from ..contenders import CONTENDERS
from ..model import GPT
from ..text import Batches, read_text
from ..widen import bf16_is_slow
from .act import Act
from .child import guarded, lift_cap, set_cap
from .processes import emit, return_freed_memory, status_nbytes

CONTENDER = CONTENDERS["exact"]
COUNTERS = Path("/proc/self/io")
MEASURED_STEPS = 2  # the first finds no state, the second reads it


def disk_nbytes() -> dict[str, int]:
    """What this process has read from devices and written to them, as the kernel counts it."""
    counters = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    return {"read": int(counters["read_bytes"]), "written": int(counters["write_bytes"])}


class Resting:
    """Parameters and state on disk, or both in memory; `phase` names where it is, for the report of a failure."""

    def __init__(self, act: Act, folder: str, widen: bool) -> None:
        self.act, self.folder, self.widen = act, folder, widen
        self.phase = "building the model"

    def tier(self, name: str) -> Any:
        if not self.folder:
            return "device"
        Path(self.folder).mkdir(exist_ok=True)
        return zk.Nvme(f"{self.folder}/{name}", ring_nbytes=self.act.ring_nbytes)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model never lies in memory as a whole, unless it is to rest there."""

        def make() -> GPT:
            return GPT(self.act.shape, self.widen).to(CONTENDER.dtype)

        torch.manual_seed(0)
        where = {"tier": self.tier("parameters")} if self.folder else {}
        model = zk.build(make, stage=self.act.stage, **where)
        return model, CONTENDER.optimizer(model.parameters(), self.act.lr, self.tier("state"))

    def train(self, steps: int, tell: bool = True) -> None:
        act = self.act
        batches = Batches(read_text(), act.rows, act.shape.context, seed=0)
        model, optimizer = self.build()
        began = time.perf_counter()
        for number in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = act.lr_at(number)
            self.phase, before, start = f"step {number}", disk_nbytes(), time.perf_counter()
            loss = model(*batches.next())
            loss.backward()
            CONTENDER.step(optimizer)
            optimizer.zero_grad()
            moved = {way: nbytes - before[way] for way, nbytes in disk_nbytes().items()}
            if tell:
                emit("step", loss=loss.item(), seconds=time.perf_counter() - start, **moved)
                if act.is_over(number, time.perf_counter() - began):
                    return


def main(text: str, folder: str, widen: str = "") -> None:
    """`widen`: whether bf16 products are computed in fp32, "0" or "1"; with "" it is measured."""
    act = Act.of_json(text)
    return_freed_memory()
    wide = bool(int(widen)) if widen else bf16_is_slow()
    small = replace(act, shape=replace(act.shape, layers=2))
    Resting(small, folder and f"{folder}/warm-up", wide).train(MEASURED_STEPS, tell=False)
    gc.collect()  # what is freed later would count for the training
    if folder and not act.cap:
        base = status_nbytes("VmSize")
        Resting(act, f"{folder}/measured", wide).train(MEASURED_STEPS, tell=False)
        emit("needed", nbytes=status_nbytes("VmPeak") - base, widen=wide)
        return
    resident = status_nbytes("VmRSS")
    if folder:
        set_cap(act.cap)
    emit("ready", resident=resident)
    training = Resting(act, folder, wide)
    message = guarded(lambda: training.train(act.steps))
    lift_cap()
    emit("end", message=message, phase=training.phase, peak=status_nbytes("VmHWM"))
