"""Models whose parameters rest on the host and on the disk: one GPU holds a few of their units at a time.

At a size that fits, losses and times of the same steps are compared with parameters that rest on the device. Then come
sizes that do not fit. Each trains in a process of its own, one after the other; peaks are read from outside.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from zerokern.examples.model import Shape

from ...infinity import device
from ...infinity.device import DEVICE, DISK, HOST, Resting
from ...offload.watch import Found, run_case
from ..report import Desk
from .offload import SHAPE, TOY
from .offload7b import LEAST_S, tell
from .offloadmax import apart

STEPS, TOKENS = 4, 16 << 10
TOY_TOKENS = 128
EIGHT, FIFTEEN = Shape(40, 4096, 1024), Shape(48, 5120, 1024)
# the figure that it is of, its format, where parameters and state rest; what is asked first
LARGE: Mapping[str, tuple[str, str, str, Shape]] = {
    "state_disk": ("exact", DEVICE, DISK, EIGHT),
    "host": ("exact", HOST, HOST, EIGHT),
    "int8": ("int8", HOST, HOST, FIFTEEN),
    "disk": ("exact", DISK, HOST, EIGHT),
    "int8_disk": ("int8", DISK, DISK, EIGHT),
}


def run(desk: Desk, out: Path) -> None:
    """What rests on disk lies in a folder in `out`, which is removed afterwards."""
    rehearse = desk.settings.rehearse
    log = out / f"{'rehearsal-' if rehearse else ''}infinity-cases.log"
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=out) as swap:

        def trained_by(case: Resting) -> Found:
            found = run_case(dataclasses.replace(case, folder=swap), log, desk.budget.left, device.__name__)
            tell(desk, str(case), found, "infinity")
            return found

        judge(desk, {where: trained_by(case_of("exact", where, HOST, SHAPE, rehearse)) for where in (DEVICE, HOST)})
        for key, (form, params, states, shape) in LARGE.items():
            if desk.budget.left < LEAST_S:
                desk.could_not(f"infinity.{key}", f"{desk.budget.left:.0f} s were left for it")
                continue
            case = case_of(form, params, states, shape, rehearse)
            if trained(trained_by(case)):
                desk.figure(f"infinity.{key}", case.shape.numel / 1e9, of=f"{STEPS} steps of {case}")


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
