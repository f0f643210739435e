"""The largest model that one GPU and its host train for ten steps, exact and with int8 states and split8.

Each trains in a process of its own; its peaks are read from outside. Before that the same steps, at a size that fits
without offload, must have the losses that they have without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerokern.examples.model import Shape
from zerokern.memory.room import memory_left

from ...offload import device
from ...offload.case import Case
from ...offload.ours import RESIDENT
from ...offload.watch import Found, run_case
from .. import host_rate
from ..report import Desk
from .eight import BESIDE, HOST_BYTES
from .offload import SHAPE, TOY
from .offload7b import LEAST_S, tell

STEPS, TOKENS = 10, 4096
# what is asked first, then what there may be room for
SHAPES: Mapping[str, Sequence[Shape]] = {
    "int8": (Shape(48, 5120, 1024), Shape(51, 5120, 1024)),
    "exact": (Shape(40, 4096, 1024), Shape(44, 4096, 1024)),
}
TOY_SHAPES: Mapping[str, Sequence[Shape]] = dict.fromkeys(SHAPES, (TOY, TOY))
NAME = device.OVERLAP
Train = Callable[[Case], Found]


def run(desk: Desk, out: Path) -> None:
    rehearse = desk.settings.rehearse
    host_rate.tell(desk, "offloadmax")
    log = out / f"{'rehearsal-' if rehearse else ''}offloadmax-cases.log"
    known: dict[Case, Found] = {}  # at toy size several are the same

    def trained_by(case: Case) -> Found:
        if case not in known:
            known[case] = run_case(case, log, desk.budget.left)
            tell(desk, f"{case.name}, {case.form}, {case.shape.numel:,} parameters", known[case], "offloadmax")
        return known[case]

    _compare(desk, trained_by)
    shapes = TOY_SHAPES if rehearse else SHAPES
    for place in range(2):
        for form, candidates in shapes.items():
            _grow(desk, trained_by, form, candidates[place], last=place == 1)


def case_of(name: str, form: str, shape: Shape, rehearse: bool) -> Case:
    tokens, on = (64, "cpu") if rehearse else (TOKENS, "cuda")
    return Case(name, form, shape.layers, shape.width, shape.context, (tokens,), STEPS, on)


def _compare(desk: Desk, trained_by: Train) -> None:
    shape = TOY if desk.settings.rehearse else SHAPE
    cases = {name: case_of(name, "exact", shape, desk.settings.rehearse) for name in (NAME, RESIDENT)}
    found = {name: trained_by(case) for name, case in cases.items()}
    losses = [one.told[0]["losses"] for one in found.values() if one.told and "losses" in one.told[0]]
    if len(losses) == len(found):
        desk.figure("offloadmax.loss", apart(*losses), of=f"{shape.numel:,} parameters")
    else:
        desk.could_not("offloadmax.loss", "; ".join(one.failed for one in found.values() if one.failed))


def apart(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Percent by which the losses differ where they differ most.

    >>> apart([2.0, 1.0], [2.0, 1.01])
    0.9901
    """
    return round(100 * max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True)), 4)


def _grow(desk: Desk, trained_by: Train, form: str, shape: Shape, last: bool) -> None:
    """One size; a figure is that of the largest that came to its end."""
    key, name = f"offloadmax.{form}", f"{NAME}, {form}, {shape.numel:,} parameters"
    if desk.budget.left < LEAST_S:
        if not last:
            desk.could_not(key, f"{desk.budget.left:.0f} s were left for it")
        return
    needed, free = HOST_BYTES[form] * shape.numel + BESIDE, min(memory_left().values(), default=0)
    if needed > free and not desk.settings.rehearse:
        why = f"it needs {needed / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} GB are free"
        desk.could_not(name if last else key, why)
        return
    found = trained_by(case_of(NAME, form, shape, desk.settings.rehearse))
    if trained(found):
        desk.figure(key, shape.numel / 1e9, of=f"{STEPS} steps of {shape.numel:,} parameters")
        desk.figure(f"{key}_bytes", found.host_per_parameter, of=f"{shape.numel:,} parameters")


def trained(found: Found) -> bool:
    """All steps, to finite losses, of which the last is below the first."""
    losses = found.told[0].get("losses", []) if found.told else []
    return len(losses) == STEPS and not found.failed and losses[-1] < losses[0]
