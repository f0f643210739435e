"""Models whose parameters rest on the host and on the disk: one GPU holds a few of their units at a time.

At a size that fits, losses and times of the same steps are compared with parameters that rest on the device. Then come
sizes that do not fit. Each trains in a process of its own, one after the other; peaks are read from outside. What the
host's memory or the disk has no room for is told before it is tried, and fewer layers train in its place.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import zerokern as zk
from zerokern.examples.model import Shape
from zerokern.memory.room import memory_left

from ...infinity import device
from ...infinity.device import DEVICE, DISK, HOST, STAGE, Resting
from ...offload.device import FORMATS
from ...offload.watch import Found, run_case
from .. import host_rate
from ..report import Desk
from .offload import SHAPE, TOY
from .offload7b import LEAST_S, tell
from .offloadmax import apart

STEPS, TOKENS = 4, 16 << 10
BESIDE_NBYTES, DISK_SHARE = 6e9, 0.95  # host memory for code, context and the system; what a file system keeps
TOY_TOKENS = 128
EIGHT, FIFTEEN = Shape(40, 4096, 1024), Shape(48, 5120, 1024)
# the figure that it is of, its format, where parameters and state rest; what takes the disk longest comes last
LARGE: Mapping[str, tuple[str, str, str, Shape]] = {
    "host": ("exact", HOST, HOST, EIGHT),
    "int8": ("int8", HOST, HOST, FIFTEEN),
    "disk": ("exact", DISK, HOST, EIGHT),
    "int8_disk": ("int8", DISK, DISK, EIGHT),
    "state_disk": ("exact", DEVICE, DISK, EIGHT),
}


def run(desk: Desk, out: Path) -> None:
    """What rests on disk lies in a folder in `out`, which is removed after each case: two may not fit side by side."""
    rehearse = desk.settings.rehearse
    host_rate.tell(desk, "infinity")
    log = out / f"{'rehearsal-' if rehearse else ''}infinity-cases.log"

    known: dict[Resting, Found] = {}  # at toy size several are the same

    def trained_by(case: Resting, limit_s: float) -> Found:
        if case in known:
            return known[case]
        with tempfile.TemporaryDirectory(prefix="infinity-", dir=out) as swap:
            found = run_case(dataclasses.replace(case, folder=swap), log, limit_s, device.__name__)
        tell(desk, str(case), found, "infinity")
        known[case] = found
        return found

    small = {where: case_of("exact", where, HOST, SHAPE, rehearse) for where in (DEVICE, HOST)}
    judge(desk, {where: trained_by(case, desk.budget.left) for where, case in small.items()})
    for place, (key, (form, params, states, shape)) in enumerate(LARGE.items()):
        if desk.budget.left < LEAST_S:
            desk.could_not(f"infinity.{key}", f"{desk.budget.left:.0f} s were left for it")
            continue
        case = case_of(form, params, states, shape, rehearse)
        fits = case if rehearse else fitting(case, room(out))
        if fits != case:
            less = f"; {fits.shape.numel:,} parameters train in their place" if fits else ""
            there = ", ".join(f"{nbytes / 1e9:.0f} GB on the {where}" for where, nbytes in needs(case).items())
            desk.could_not(f"infinity.{key}", f"{case.shape.numel:,} parameters need {there}, which are not free{less}")
        if fits:
            found = trained_by(fits, min(desk.budget.left, 2 * desk.budget.left / (len(LARGE) - place)))
            if trained(found) and fits == case:
                desk.figure(f"infinity.{key}", case.shape.numel / 1e9, of=f"{STEPS} steps of {case}")


def room(folder: Path) -> dict[str, float]:
    """Bytes that are free, on the host and on the disk of a folder."""
    left = min(memory_left().values(), default=0)
    return {HOST: left - BESIDE_NBYTES, DISK: DISK_SHARE * shutil.disk_usage(folder).free}


def needs(case: Resting) -> dict[str, int]:
    """Bytes on the host and on the disk, as `zk.plan` counts them.

    >>> one = case_of("exact", DEVICE, DISK, Shape(40, 4096, 1024), rehearse=False)
    >>> {where: round(nbytes / 1e9) for where, nbytes in needs(one).items()}
    {'cpu': 32, 'nvme': 81}
    """
    plan = zk.plan(
        case.shape.numel, stage=STAGE, tier=case.states, param_tier=case.params, schedule=device.SCHEDULE,
        device="cuda", param_dtype="bf16", **FORMATS[case.form],
    )  # fmt: skip
    return {where: sum(one.nbytes for one in plan.held if one.tier == where) for where in (HOST, DISK)}


def fitting(case: Resting, free: Mapping[str, float]) -> Resting | None:
    """The case with as many layers as there is room for; None where not even half of them fit."""
    for layers in range(case.layers, case.layers // 2 - 1, -1):
        one = dataclasses.replace(case, layers=layers)
        if all(nbytes <= free[where] for where, nbytes in needs(one).items()):
            return one
    return None


def case_of(form: str, params: str, states: str, shape: Shape, rehearse: bool) -> Resting:
    shape, tokens, on = (TOY, TOY_TOKENS, "cpu") if rehearse else (shape, TOKENS, "cuda")
    return Resting(
        f"parameters on {params}", form, shape.layers, shape.width, shape.context, (tokens,), STEPS, on,
        params=params, states=states,
    )  # fmt: skip


def judge(desk: Desk, found: Mapping[str, Found]) -> None:
    """Losses and times of parameters on the host beside those of parameters on the device."""
    told = {where: one.told[0] for where, one in found.items() if one.told and "losses" in one.told[0]}
    if len(told) < len(found):
        why = "; ".join(one.failed for one in found.values() if one.failed) or "a case told nothing"
        for key in ("share", "loss"):
            desk.could_not(f"infinity.{key}", why)
        return
    mine, theirs = told[HOST], told[DEVICE]
    desk.figure("infinity.loss", apart(mine["losses"], theirs["losses"]), of=f"{STEPS} steps")
    desk.figure("infinity.share", theirs["seconds"] / mine["seconds"], of=f"{found[HOST].numel:,} parameters")


def trained(found: Found) -> bool:
    """All steps, to finite losses, of which the last is below the first."""
    losses = found.told[0].get("losses", []) if found.told else []
    return len(losses) == STEPS and not found.failed and losses[-1] < losses[0]
