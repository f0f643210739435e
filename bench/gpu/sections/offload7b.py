"""A GPT of 7B parameters, int8 states on the host, in each schedule and without offload, where that fits.

Two of that size do not fit side by side: each trains in a process of its own, one after the other, and its peaks are
read from outside. Shares are therefore ratios of means, not of turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zerokern.examples.model import Shape

from ...offload import device
from ...offload.case import COMPUTE, Case
from ...offload.ours import RESIDENT
from ...offload.watch import Found, run_case
from .. import host_rate
from ..report import Desk
from .offload import SHARES, TOKENS, TOY, TOY_TOKENS

SHAPE = Shape(layers=35, width=4096, context=1024)
STEPS = 4
# what is asked needs the first three; each is kept as soon as it is there
ORDER = (device.DELAYED, RESIDENT, device.OVERLAP, COMPUTE, device.SYNC)
LEAST_S = 30.0


def run(desk: Desk, out: Path) -> None:
    settings = desk.settings
    host_rate.tell(desk, "offload7b")
    log = out / f"{'rehearsal-' if settings.rehearse else ''}offload7b-cases.log"
    found = {}
    for name in ORDER[:3] if settings.rehearse else ORDER:
        if desk.budget.left < LEAST_S:
            desk.could_not(f"offload7b: {name}", f"{desk.budget.left:.0f} s were left for it")
            continue
        found[name] = run_case(case_of(name, settings.rehearse), log, desk.budget.left)
        tell(desk, name, found[name])
    judge(desk, found)


def case_of(name: str, rehearse: bool) -> Case:
    shape, tokens, on = (TOY, TOY_TOKENS, "cpu") if rehearse else (SHAPE, TOKENS, "cuda")
    return Case(name, "int8", shape.layers, shape.width, shape.context, tokens, 2 if rehearse else STEPS, on)


def tell(desk: Desk, name: str, found: Found, section: str = "offload7b") -> None:
    """What a case took, as a line and as a fact; a rehearsal took nothing."""
    if found.failed:
        desk.could_not(f"{section}: {name}", found.failed)
    for one in found.told:
        if "failed" in one:
            desk.could_not(f"{section}: {name}, {one['tokens']:,} tokens", one["failed"])
    losses = {one["tokens"]: one["losses"] for one in found.told if "losses" in one}
    if desk.settings.rehearse:
        desk.say(f"  {name}: rehearsed, {len(losses)} counts of tokens")
        return
    rates = {one["tokens"]: round(one["tokens"] / one["seconds"]) for one in found.told if "seconds" in one}
    peaks = {
        "parameters": found.numel,
        "host_bytes_per_param": round(found.host_per_parameter, 2),
        "host_gb": round(found.host_nbytes / 1e9, 2),
        "device_gb": None if found.device_nbytes is None else round(found.device_nbytes / 1e9, 2),
    }
    desk.say(f"  {name}: tokens/s {rates}, peaks {peaks}")
    desk.fact(f"{section}: {name}", {"tokens_per_s": rates, "losses": losses, **peaks})


def judge(desk: Desk, found: Mapping[str, Found]) -> None:
    """Of each schedule that is asked for, its share of no offload at the number of tokens where it is worst."""
    for key, (name, least) in SHARES.items():
        shares = {}
        for count in TOY_TOKENS if desk.settings.rehearse else TOKENS:
            mine, theirs = (found[who].at(count) if who in found else {} for who in (name, RESIDENT))
            if mine and theirs and (count >= least or desk.settings.rehearse):
                shares[count] = theirs["seconds"] / mine["seconds"]
        if shares:
            worst = min(shares, key=shares.__getitem__)
            desk.figure(f"offload7b.{key}", shares[worst], of=f"{name}, {worst:,} tokens")
        else:
            reasons = [found[who].failed for who in (name, RESIDENT) if who in found and found[who].failed]
            desk.could_not(f"offload7b.{key}", "; ".join(reasons) or f"{name} or {RESIDENT} was not measured")
