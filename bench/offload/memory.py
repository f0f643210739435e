"""What one contender alone takes of host memory, by what the system says of its processes."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..contest import Missing
from ..disk import usage
from ..zero.trainer import Candidate, Seat
from ..zero.tuning import by_name
from ..zero.turns import Floor
from .contenders import Make, groups

Groups = Callable[[Seat], dict[str, Make]]
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


def weigh(floor: Floor, groups: Groups = groups) -> dict[str, Any]:
    """Bytes of all ranks together for the one contender that the job names: between steps, at most in a step, and those
    that a step reads from the disk and writes there.

    It trains a small model first, so that code, threads and what libraries keep for themselves count for nobody.
    """
    (name,) = floor.seat.job.names
    small = Floor(dataclasses.replace(floor.seat, job=dataclasses.replace(floor.seat.job, model=SMALL)), floor._tell)
    try:
        _train(small, name, groups)
        tidy()
        before = resident_nbytes()
        found = _train(floor, name, groups)
    except Missing as reason:
        return {"missing": str(reason)}
    own = {**found, "held": found["held"] - before, "peak": found["peak"] - before}
    return {what: sum(floor.all(nbytes)) for what, nbytes in own.items()}


def _train(floor: Floor, name: str, groups: Groups) -> dict[str, int]:
    player = floor.seated(_chosen(floor, name, groups))
    floor.turn(player, STEPS - 1)
    tidy()
    forget_peak()
    before = usage.of_process()
    floor.turn(player, 1)
    used, peak = usage.of_process() - before, peak_nbytes()
    tidy()
    found = {"held": resident_nbytes(), "peak": peak, "read": used.read_nbytes, "written": used.written_nbytes}
    floor.leave([player])
    return found


def _chosen(floor: Floor, name: str, groups: Groups) -> Candidate:
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
