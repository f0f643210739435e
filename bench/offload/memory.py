"""What one contender alone takes of host memory, by what the system says of its processes."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
from pathlib import Path
from typing import Any

from ..contest import Missing
from ..zero.trainer import Candidate
from ..zero.tuning import by_name
from ..zero.turns import Floor
from .contenders import groups

STEPS = 3
SMALL = "tiny"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESIDENT = r"(?:VmRSS|HugetlbPages):\s+(\d+) kB"
FORGET_PEAK = "5"


def resident_nbytes() -> int:
    """What of this process lies in memory now."""
    return 1024 * sum(map(int, re.findall(RESIDENT, STATUS.read_text())))


def peak_nbytes() -> int:
    """The most that it has held since `forget_peak`."""
    found = re.findall(r"(?:VmHWM|HugetlbPages):\s+(\d+) kB", STATUS.read_text())
    return 1024 * sum(map(int, found))


def forget_peak() -> None:
    CLEAR.write_text(FORGET_PEAK)


def tidy() -> None:
    """Gives back what nobody uses, also what the allocator kept for itself."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def weigh(floor: Floor) -> dict[str, Any]:
    """Bytes of all ranks together for the one contender that the job names: between steps, and at most in a step.

    It trains a small model first, so that code, threads and what libraries keep for themselves count for nobody.
    """
    (name,) = floor.seat.job.names
    small = Floor(dataclasses.replace(floor.seat, job=dataclasses.replace(floor.seat.job, model=SMALL)), floor._tell)
    try:
        _train(small, name, keep=False)
        tidy()
        before = resident_nbytes()
        held, peak = _train(floor, name, keep=True)
    except Missing as reason:
        return {"missing": str(reason)}
    return {"held": sum(floor.all(held - before)), "peak": sum(floor.all(peak - before))}


def _train(floor: Floor, name: str, keep: bool) -> tuple[int, int]:
    player = floor.seated(_chosen(floor, name))
    floor.turn(player, STEPS - 1)
    tidy()
    if keep:
        forget_peak()
    floor.turn(player, 1)
    peak = peak_nbytes()
    tidy()
    held = resident_nbytes()
    floor.leave([player])
    return held, peak


def _chosen(floor: Floor, name: str) -> Candidate:
    """The contender in the wiring that it competes with."""
    wiring, reasons = floor.seat.job.wirings.get(name), []
    for make in groups(floor.seat).values():
        try:
            rivals = by_name(floor.agreed(make)).get(name, [])
        except Missing as reason:
            reasons.append(str(reason))
            continue
        if rivals:
            return next((one for one in rivals if one.wiring == wiring), rivals[0])
    raise Missing("; ".join([f"{name} cannot be made", *reasons]))
