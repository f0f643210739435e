"""Parts of a large model's life, in a process of its own: `python -m bench.infinity.life begin|resume CASE`.

Everything rests on disk. It tells what happens as lines of JSON, and waits for an answer after each part, so that
whoever started it can read what the system says of this process, from outside. The cap is RLIMIT_DATA: private writable
memory, above what the process holds once a small model has lived the same life.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerokern as zk
from zerokern.examples.demo.child import set_cap
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text

from ..offload.case import ask, tell

STAGE, MAX_NORM, LR = 3, 1.0, 1e-4
FORMATS = {"state_format": "int8", "master_format": "split8"}
SCHEDULE = "overlap"
BEGIN, RESUME, SAVE, EXPORT = "begin", "resume", "save", "export"
STEPS = 3
TEXT_NBYTES = 1 << 20


@dataclass(frozen=True)
class Case:
    """What lives, below which folder, and under which cap on memory."""

    shape: Shape
    folder: str
    cap: int
    room: tuple[int, ...] = ()
    """on the disk, for parameters with gradients, and for state: taken at once, so that a disk too small shows then"""
    widen: bool = False
    """bf16 products in fp32: decided once, for it changes the losses"""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """
        >>> case = Case(Shape(2, 64, 32), "disk", 1 << 30, (1 << 30, 1 << 30))
        >>> Case.from_json(case.to_json()) == case
        True
        """
        fields = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"]), "room": tuple(fields["room"])})

    @property
    def saved(self) -> Path:
        return Path(self.folder, "checkpoint")

    def small(self) -> Case:
        return dataclasses.replace(self, shape=Shape(2, 64, self.shape.context), folder=f"{self.folder}/small", room=())


class Life:
    """One model with its optimizer; `part` is told the name of each part, and what to do."""

    def __init__(self, case: Case, part: Callable[[str, Callable[[], Any]], object]) -> None:
        self.case, self.part = case, part
        self.batches = Batches(read_text(at_most=TEXT_NBYTES), 1, case.shape.context, seed=0)

    def run(self, which: str) -> None:
        saved, after = self.case.saved, f"step {STEPS + 1}"
        self.part("build", self.build)
        if which == BEGIN:
            for step in range(1, STEPS + 1):
                self.part(f"step {step}", self.step)
            self.part(SAVE, lambda: zk.save(saved, self.model, self.opt))
            self.part(after, self.step)
            return
        for _ in range(STEPS):
            self.batches.next()
        self.part("load", lambda: zk.load(saved, self.model, self.opt))
        self.part(after, self.step)
        shutil.rmtree(saved)
        self.part(EXPORT, lambda: zk.export(Path(self.case.folder, "exported"), self.model))

    def build(self) -> None:
        case = self.case
        Path(case.folder).mkdir(exist_ok=True)
        tiers = [
            zk.Nvme(Path(case.folder, name), budget=room)
            for name, room in zip(("parameters", "state"), case.room or (None, None), strict=True)
        ]
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.model = zk.build(lambda: GPT(case.shape, case.widen), stage=STAGE, tier=tiers[0], keep="device")
        finally:
            torch.set_default_dtype(before)
        self.opt = zk.AdamW(
            self.model.parameters(), lr=LR, tier=tiers[1], schedule=SCHEDULE, max_grad_norm=MAX_NORM, **FORMATS
        )

    def step(self) -> dict[str, Any]:
        loss = self.model(*self.batches.next())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.item()}


def told(name: str, work: Callable[[], Any]) -> None:
    tell(begun=name)
    started = time.perf_counter()
    found = work()
    ask(part=name, seconds=time.perf_counter() - started, **(found if isinstance(found, dict) else {}))


def main(which: str, text: str) -> None:
    case = Case.from_json(text)
    for one in (BEGIN, RESUME):  # code, threads, and what libraries keep for themselves count for nothing
        Life(case.small(), lambda name, work: work()).run(one)
        gc.collect()
    shutil.rmtree(case.small().folder)
    set_cap(case.cap)
    ask(ready=case.shape.numel)
    Life(case, told).run(which)


if __name__ == "__main__":
    main(*sys.argv[1:])
