"""8B parameters, 525M of them an embedding of 128k words, on one GPU and its host: a few exact steps with the state on
the host, in a process of its own.

What its host memory has no room for is told before it is tried; then int8 states with split8 train in its place.
"""

from __future__ import annotations

from zerokern.examples.model import VOCABULARY, Shape
from zerokern.memory.room import memory_left

from ...offload import device
from ...offload.case import Case
from ...offload.watch import Found, run_case
from .. import host_rate, machine
from ..report import Desk
from ..training import flops_per_token, peak_tflops
from .offload import TOY
from .offload7b import tell

STEPS, TOKENS = 4, 8 << 10
SHAPE, WORDS = Shape(38, 4096, 1024), 128_256
HOST_BYTES = {"exact": 14.2, "int8": 7.3}  # per parameter, at most, as `offloadmax` asks
BESIDE = 6e9  # bytes of host memory for code, context and the system
NAME = device.OVERLAP
TOY_WORDS = 1000
MOST = 1.4  # of its time: it tells of its steps when all are over


def run(desk: Desk) -> None:
    rehearse = desk.settings.rehearse
    host_rate.tell(desk, "eight")
    form = "exact" if rehearse else chosen(desk)
    if not form:
        return
    shape, tokens, on, words = (TOY, 64, "cpu", TOY_WORDS) if rehearse else (SHAPE, TOKENS, "cuda", WORDS)
    case = Case(NAME, form, shape.layers, shape.width, shape.context, (tokens,), STEPS, on, words)
    found = run_case(case, desk.log, MOST * desk.budget.left)
    tell(desk, f"{NAME}, {form}, {case.numel:,} parameters", found, "eight")
    if trained(found):
        desk.figure(f"eight.{form}", case.numel / 1e9, of=f"{STEPS} steps of {case.numel:,} parameters")
        _tell_mfu(desk, found, shape, tokens)
    elif form == "exact":
        desk.could_not("eight.exact", found.failed or "the losses of its steps do not fall")


def chosen(desk: Desk) -> str:
    """The formats that the free host memory has room for, exact if it can be; "" for none."""
    free = min(memory_left().values(), default=0)
    numel = SHAPE.numel + (WORDS - VOCABULARY) * SHAPE.width
    for form, per_parameter in HOST_BYTES.items():
        needed = numel * per_parameter + BESIDE
        if needed <= free:
            return form
        why = f"it needs {needed / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} GB are free"
        desk.could_not(f"eight.{form}", why)
    return ""


def trained(found: Found) -> bool:
    """All steps, to finite losses, of which the last is below the first."""
    losses = found.told[0].get("losses", []) if found.told else []
    return len(losses) == STEPS and not found.failed and losses[-1] < losses[0]


def _tell_mfu(desk: Desk, found: Found, shape: Shape, tokens: int) -> None:
    if desk.settings.rehearse:
        return
    name = machine.gpu().get("name", "")
    peak, seconds = peak_tflops(name), found.told[0]["seconds"]
    mfu = None if peak is None else round(tokens / seconds * flops_per_token(shape) / peak / 1e12, 4)
    desk.fact("eight: a step", {"device": name, "peak_tflops": peak, "seconds": round(seconds, 3), "mfu": mfu})
