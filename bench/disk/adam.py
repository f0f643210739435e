"""Adam over state on disk: the whole step, beside the same transfers without arithmetic, and the same update in memory.

All take turns in the same rounds. What hides best costs no more than the longer of its two halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import zerokern as zk
from zerokern.memory import Slot, flowing

from ..contest import WrongResult
from ..shapes import Shape
from ..step import Format
from .contest import Mover, Outcome, Pass, Row, Say, fastest_of, measured, rounds, row
from .pattern import GIB

FORMATS = (Format("split16", "fp32"), Format("split8", "int8"))
EXACT = FORMATS[0]
IO, COMPUTE, LONGER = "I/O alone", "compute alone", "the longer of both"
CHECKED_STEPS = 3
LR = 1e-3
PAIRS, SMOKE_PAIRS = 15, 3


class TieredStep:
    """The same parameters and gradients twice: one optimizer with its state on disk, its twin with it in memory."""

    def __init__(self, folder: Path, shape: Shape, layout: Format, grads: Sequence[torch.Tensor]) -> None:
        self.numel, self.layout = shape.numel, layout
        self.on_disk, self.disk_params = _optimizer(shape, layout, grads, zk.Nvme(folder))
        self.in_memory, self.memory_params = _optimizer(shape, layout, grads, "cpu")

    def check(self) -> None:
        """A few steps of both give the same bits; afterwards all state lies on the disk, written in this run."""
        for _ in range(CHECKED_STEPS):
            self.on_disk.step()
            self.in_memory.step()
        for i, (found, wanted) in enumerate(zip(self.disk_params, self.memory_params, strict=True)):
            if not torch.equal(found, wanted):
                at = int((found != wanted).flatten().nonzero()[0])
                raise WrongResult(f"{self.layout.name}: parameter {i}[{at}] is {found.view(-1)[at]} with state on disk")

    @property
    def nbytes(self) -> int:
        """What a step reads and writes."""
        return 2 * sum(record.nbytes for record in self._disk.records.values())

    @property
    def _disk(self) -> Any:
        return self.on_disk.holdings.disk  # type: ignore[attr-defined]

    def move(self) -> None:
        """Every record through the ring and back, as a step moves it; nothing is changed."""
        disk = self._disk
        records = list(disk.records.values())

        def fetch(i: int, slot: Slot, after: Any) -> Any:
            return disk.fetch(records[i], disk.view(slot, records[i]), after)

        def store(i: int, slot: Slot) -> Any:
            return disk.store(records[i], disk.view(slot, records[i]))

        for _ in flowing(disk.ring, len(records), fetch, lambda i, slot: None, store):
            pass

    def movers(self) -> list[Mover]:
        """The step, and its two halves."""
        name, disk = self.layout.name, self._disk
        stats = disk.tier.swap.stats()
        wiring = f"{stats['engine']}, block {stats['block']}, depth {stats['depth']}, {len(disk.ring.slots)} slots"
        turns: list[tuple[str, Callable[[], object], str]] = [
            (name, self.on_disk.step, wiring),
            (f"{name}: {IO}", self.move, "the same records through the same ring, nothing computed"),
            (f"{name}: {COMPUTE}", self.in_memory.step, "the same update, its state in memory"),
        ]
        return [
            Mover(label, how, lambda run=run: measured(self.nbytes, run), self.check)  # type: ignore[misc]
            for label, run, how in turns
        ]

    def close(self) -> None:
        if self._disk.is_open:
            self._disk.tier.swap.close()


def _optimizer(
    shape: Shape, layout: Format, grads: Sequence[torch.Tensor], tier: str | zk.Nvme
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    noise = torch.Generator().manual_seed(0)
    params = []
    for numel, grad in zip(shape.numels, grads, strict=True):
        param = torch.nn.Parameter((torch.randn(numel, generator=noise) * 0.02).bfloat16())
        param.grad = grad
        params.append(param)
    made = zk.AdamW(params, lr=LR, tier=tier, state_format=layout.state, master_format=layout.master)
    return made, [param.detach() for param in params]


@contextlib.contextmanager
def steps(folder: Path, shape: Shape) -> Iterator[list[TieredStep]]:
    """One per format, each with a folder of its own; the folders are gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="zerokern-bench-", dir=folder))
    noise = torch.Generator().manual_seed(1)
    grads = [(torch.randn(numel, generator=noise) * 0.05).bfloat16() for numel in shape.numels]
    made: list[TieredStep] = []
    try:
        for layout in FORMATS:
            made.append(TieredStep(place / layout.state, shape, layout, grads))
        yield made
    finally:
        for one in made:
            one.close()
        shutil.rmtree(place, ignore_errors=True)


def _off_disk(mover: Mover) -> dict[str, None]:
    """Nothing of it reaches the disk, so the disk is no roof to it."""
    return {"roof_share": None, "disk_share": None} if mover.name.endswith(COMPUTE) else {}


def measure(folder: Path, shape: Shape, pairs: int, say: Say, advance: Callable[[str, int, int], None]) -> Outcome:
    name = "AdamW over state on disk"
    with steps(folder, shape) as made:
        for one in made:
            one.check()
            say(f"{one.layout.name}: the same bits as with state in memory; {one.nbytes / GIB:.2f} GiB move per step")
        movers = [mover for one in made for mover in one.movers()]
        passes = rounds(movers, pairs, lambda done: advance(name, done, pairs))
        return dataclasses.replace(summary(name, made, movers, passes), interrupted=passes.interrupted)


def summary(name: str, made: Sequence[TieredStep], movers: Sequence[Mover], passes: dict[str, list[Pass]]) -> Outcome:
    roof = fastest_of({f"{one.layout.name}: {IO}": passes[f"{one.layout.name}: {IO}"] for one in made})
    rows: list[Row] = []
    for one in made:
        label = one.layout.name
        halves = {half: passes[f"{label}: {half}"] for half in (IO, COMPUTE)}
        peers = {
            **halves,
            LONGER: [max(pair, key=lambda found: found.ns) for pair in zip(*halves.values(), strict=True)],
        }
        if one.layout is not EXACT:
            # the same parameters, so that a ratio of times is one of parameters per second
            peers[EXACT.name] = [dataclasses.replace(found, nbytes=one.nbytes) for found in passes[EXACT.name]]
        for mover in movers:
            if mover.name.split(":")[0] == label:
                whole = mover.name == label
                found = row(
                    mover, passes[mover.name], passes[roof], peers if whole else None, (one.numel, "parameters")
                )
                rows.append(dataclasses.replace(found, is_peer=False, cpu_ratio={}, **_off_disk(mover)))
    return Outcome(name, rows, {}, roof, statistics.median(found.gb_s for found in passes[roof]))
