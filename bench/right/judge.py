"""What came of a cell: right, refused by name, wrong, crash or hang.

* **right**: the program ended on all ranks, and every number is within the tolerance of plain torch's.
* **refused**: the library itself raised an error with a message, in a statement of its own that raises or asserts, or
  its documentation says that it cannot do this. An error that comes out of its insides is a crash.
* **wrong**: the program ended, and a number is not what it should be. Nobody was told.
* **crash**: any other error, or a process that died.
* **hang**: not over within the time limit, on a rank that nobody had told of an error.

Tolerances are arithmetic. A program takes `n` roundings in a chain at most, n = 1024: rows times width times steps. In
fp32 they are worth n units of roundoff at the very worst, 2**-14; in bf16 their errors have both signs, and drift by
sqrt(n) units, 2**-3. That share is of what changed: of the largest update of the same parameter, or of a seen number
itself. To it comes the rounding of the parameter's own value. A gradient whose terms cancel, such as that of a bias
before a norm, has the roundings of those terms, which are as large as elsewhere: no update that there is counts as less
than a quarter of the model's largest. States of 8 bits are half a step of their code off, 2**-5 of a value, in two
states for three steps: an eighth of the update and somewhat more, a quarter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RIGHT, REFUSED, WRONG, CRASH, HANG = VERDICTS = ("right", "refused", "wrong", "crash", "hang")

SHARE = {"fp32": 2.0**-14, "bf16": 2.0**-3, "int8": 2.0**-2}
ROUNDOFF = {"fp32": 2.0**-22, "bf16": 2.0**-8, "int8": 2.0**-22}
SMALL_UPDATE = 1 / 4


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank ended: with a result, an error, a signal, or not at all."""

    result: dict[str, Any] | None = None
    error: str = ""  # "ValueError: message"
    named: bool = False  # whether the library raised it by a statement of its own, with a message
    died: str = ""  # "signal 11", "exit status 1"


def verdict(ends: Sequence[Ended], reference: Sequence[dict[str, Any]], width: str) -> tuple[str, str]:
    """The verdict on a cell, and one line that says why."""
    for one in ends:
        if one.named:
            return REFUSED, one.error
    for one in sorted(ends, key=lambda one: not one.died):  # the others only say that it is gone
        if one.error or one.died:
            return CRASH, one.died or one.error
    for rank, one in enumerate(ends):
        if one.result is None:
            return HANG, f"rank {rank} was not done within the time limit"
    for rank, (one, theirs) in enumerate(zip(ends, reference, strict=True)):
        assert one.result is not None
        if says := differs(one.result, theirs, width):
            return WRONG, f"rank {rank}: {says}"
    return RIGHT, ""


def differs(mine: dict[str, Any], theirs: dict[str, Any], width: str) -> str:
    """The first number that is not right, or ""."""
    names = [what for what, _ in mine["seen"]]
    if names != [what for what, _ in theirs["seen"]]:
        return f"saw {len(names)} numbers, plain torch {len(theirs['seen'])}"
    for at, ((what, value), (_, wanted)) in enumerate(zip(mine["seen"], theirs["seen"], strict=True)):
        if not isinstance(wanted, Tensor):
            if value != wanted:
                return f"{what}, number {at}: {value}, plain torch {wanted}"
        elif says := beyond(value, wanted, SHARE[width] * largest(wanted) + ROUNDOFF[width]):
            return f"{what}, number {at}: {says}"
    for (before, mine_after), (_, after) in zip(mine["models"], theirs["models"], strict=True):
        moved = {name: largest(after[name].float() - before[name].float()) for name in after}
        most = max(moved.values(), default=0.0)
        for name, wanted in after.items():
            scale = max(moved[name], most * SMALL_UPDATE if moved[name] else 0.0)
            slack = SHARE[width] * scale + ROUNDOFF[width] * largest(wanted)
            if says := beyond(mine_after.get(name), wanted, slack):
                return f"{name}: {says}; its update is at most {moved[name]:.3g}"
    return ""


def largest(value: Tensor) -> float:
    return float(value.detach().float().abs().max()) if value.numel() else 0.0


def beyond(mine: Any, wanted: Tensor, slack: float) -> str:
    """Whether a tensor is further from the reference than `slack`; NaN is nowhere near."""
    if not isinstance(mine, Tensor) or mine.shape != wanted.shape:
        return f"is {tuple(mine.shape) if isinstance(mine, Tensor) else mine}, not of shape {tuple(wanted.shape)}"
    off = torch.nan_to_num((mine.float() - wanted.float()).abs(), nan=torch.inf)
    worst = float(off.max()) if off.numel() else 0.0
    if bool(torch.isnan(wanted).any()):
        return "plain torch itself has NaN"
    return f"off by {worst:.3g}, {slack:.3g} at most" if worst > slack else ""
