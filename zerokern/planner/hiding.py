"""How many tokens a step needs to hide what moves beside compute, and the efficiency without and with that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerokern.schedule import Machine, StepProgram

__all__ = ["Hiding", "efficiency", "hiding"]

_LINKS = {"up": "host to device", "down": "device to host", "read": "disk read", "write": "disk written"}


@dataclass(frozen=True)
class Hiding:
    """What moves in a step: bytes of one rank, how long they take alone, and from how many tokens compute is longer."""

    what: str
    nbytes: int
    seconds: float
    tokens: float
    """T*"""


def efficiency(ait: float, bytes_s: float, flops_s: float) -> float:
    """Of a step that first moves and then computes: ZeRO-Infinity's `ait * bw / (ait * bw + peak)`.

    `ait`: flops for each byte that is moved. Of tokens T in units in which T* is the peak: T / (T + T*).

    >>> round(efficiency(2 * 1024, 70e9, 70e12), 2)  # parameters and gradients, batch 2 of 1,024 tokens
    0.67
    """
    return ait * bytes_s / (ait * bytes_s + flops_s) if ait * bytes_s + flops_s else 1.0


def hiding(program: StepProgram, machine: Machine, tokens: int) -> Iterator[Hiding]:
    """Link by link, then the disk in both directions at once, then host memory, for a step of so many tokens.

    >>> from zerokern.planner import plan
    >>> from zerokern.planner.forecast import step_program
    >>> from zerokern.schedule import machine_of
    >>> program = step_program(plan("1B", stage=3, param_tier="cpu", tier="cpu", keep="device"), "delayed", 4096)
    >>> [(one.what, round(one.tokens)) for one in hiding(program, machine_of("h100-pcie"), 4096)][:2]
    [('host to device', 5371), ('device to host', 2712)]
    """
    compute = sum(op.flops for op in program.ops) / machine.flops_s / tokens
    moved = {lane: sum(op.nbytes for op in program.ops if op.lane == lane) for lane in (*_LINKS, "cpu")}
    for lane, name in _LINKS.items():
        if moved[lane]:
            seconds = moved[lane] / machine.rate(lane) / 1e9
            yield Hiding(name, moved[lane], seconds, seconds / compute)
    if moved["read"] and moved["write"]:
        seconds = _both_ways(machine, moved["read"] / 1e9, moved["write"] / 1e9)
        yield Hiding("disk, both at once", moved["read"] + moved["write"], seconds, seconds / compute)
    if moved["cpu"]:
        copies = sum(moved[lane] for lane in _LINKS) if machine.host_all_gb_s is not None else 0
        nbytes = moved["cpu"] + copies
        seconds = nbytes / (machine.host_all_gb_s or machine.host_gb_s) / 1e9
        yield Hiding("host memory", nbytes, seconds, seconds / compute)


def _both_ways(machine: Machine, read: float, written: float) -> float:
    """Seconds for so many GB: both until the shorter is over, then the other alone."""
    rates = machine.rate("read", {"write"}), machine.rate("write", {"read"})
    both = min(read / rates[0], written / rates[1])
    left = (read - both * rates[0]) / machine.rate("read"), (written - both * rates[1]) / machine.rate("write")
    return both + max(left)
