"""What came of a cell: right, refused by name, wrong, crash, hang or unclear.

* **right**: the program ended on all ranks, and every number is within the bound around plain torch's.
* **refused**: the library itself raised an error with a message, in a statement of its own that raises or asserts, or
  its documentation says that it cannot do this. An error that comes out of its insides is a crash.
* **wrong**: the program ended, and a number is not what it should be. Nobody was told.
* **crash**: any other error, or a process that died.
* **hang**: not over within the time limit, on a rank that nobody had told of an error.
* **unclear**: wrong, and nobody has shown that it is the library and not its adapter (`known.py`).

The bound answers one question: how far apart may two right implementations be? Both do the same sums, in another order
and with roundings in other places. No formula for all programs is both safe and tight: a gradient whose terms cancel
(a bias before a norm: exactly zero) consists of roundings alone, Adam divides it by `eps`, later steps carry it on.
So the error is taken from the program itself, by Monte Carlo arithmetic (`noise.py`): the reference runs again,
`noise.RUNS` times, and each operation's result is off by a random part of what its rounding may be:

* u = 2**-24 for each elementwise operation in fp32: a significand has 24 bits, so numbers from 1 to 2 are 2**-23
  apart, and round to nearest is off by half of that at most;
* 8 u in forward and backward: a sum of k terms in another order is off by about sqrt(k) u, and rows and widths of the
  programs are 96 at most, sqrt(96) < 10, drawn evenly up to the limit;
* 2**-8, the same of bf16, for results in bf16, and for all results of forward and backward in a program that computes
  in bf16, because libraries differ in what they keep in fp32 there; masters and states are updated in fp32 by all.
  A significand of bf16 has 8 bits, so numbers from 1 to 2 are 2**-7 apart, and half of that is 2**-8: one correct
  rounding of 1 + 2**-8 is off by as much. 2**-9 is what it is off by just below 2, the best place of a binade, and
  half of what rounding may do elsewhere.

The runs sample cancellation, clipping, `eps` and growth over the steps, each as the program has them. The bound of a
number is MARGIN times the largest distance of a noisy run from the exact one, over all elements of the parameter and
all ranks, and four roundings of the number itself. MARGIN is 32: a parameter of one element, whose distance is about
normal with deviation s, has both samples below s / 8 with a probability of 1 %, and a right library is within 4 s with
99.99 %; parameters of many elements have as many samples. It is the same for all libraries. Where a program computes in
bf16, some libraries show the bf16 copy of a parameter, not its master: one rounding to bf16, 2**-8 of its value, is
added for all.

States of 8 bits are lossy on purpose. Their code is half a step off, 2**-5 of a value, in two states for three steps:
an eighth of the update and somewhat more, so a quarter of a parameter's largest update is added there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .noise import BF16, ELEMENTWISE

RIGHT, REFUSED, WRONG, CRASH, HANG, UNCLEAR = VERDICTS = ("right", "refused", "wrong", "crash", "hang", "unclear")

GONE = "Connection closed by peer"
MARGIN = 32.0
ROUNDOFF, OF_COPY = 4 * ELEMENTWISE, BF16
LOSSY_SHARE = 2.0**-2

Results = Sequence[dict[str, Any]]  # of each rank


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank ended: with a result, an error, a signal, or not at all."""

    result: dict[str, Any] | None = None
    error: str = ""  # "ValueError: message"
    named: bool = False  # whether the library raised it by a statement of its own, with a message
    died: str = ""  # "signal 11", "exit status 1"


@dataclasses.dataclass(frozen=True)
class Reference:
    """What each rank of plain torch has, and how far a right library may be from it."""

    results: Results
    seen: Sequence[float]
    models: Sequence[dict[str, float]]
    is_narrow: bool = False

    @classmethod
    def of(cls, results: Results, noisy: Sequence[Results], is_narrow: bool = False) -> Reference:
        """From the exact run and the noisy ones."""
        pairs = [pair for run in noisy for pair in zip(results, run, strict=True)]
        seen = [0.0] * max(len(exact["seen"]) for exact in results)
        models: list[dict[str, float]] = [dict.fromkeys(after, 0.0) for _, after in results[0]["models"]]
        for exact, other in pairs:
            for at, ((_, value), (_, near)) in enumerate(zip(exact["seen"], other["seen"], strict=True)):
                if isinstance(value, Tensor):
                    seen[at] = max(seen[at], distance(near, value))
            for bounds, (_, value), (_, near) in zip(models, exact["models"], other["models"], strict=True):
                for name in bounds:
                    bounds[name] = max(bounds[name], distance(near[name], value[name]))
        return cls(results, seen, models, is_narrow)


def verdict(ends: Sequence[Ended], reference: Reference, is_lossy: bool = False) -> tuple[str, str]:
    """The verdict on a cell, and one line that says why."""
    for one in ends:
        if one.named:
            return REFUSED, one.error
    for one in sorted(ends, key=lambda one: (not one.died, GONE in one.error)):  # the others only say that it is gone
        if one.error or one.died:
            return CRASH, one.died or one.error
    for rank, one in enumerate(ends):
        if one.result is None:
            return HANG, f"rank {rank} was not done within the time limit"
    for rank, one in enumerate(ends):
        assert one.result is not None
        if says := differs(one.result, reference, rank, is_lossy):
            return WRONG, f"rank {rank}: {says}"
    return RIGHT, ""


def differs(mine: dict[str, Any], reference: Reference, rank: int = 0, is_lossy: bool = False) -> str:
    """The first number that is not right, or ""."""
    theirs = reference.results[rank]
    names = [what for what, _ in mine["seen"]]
    if names != [what for what, _ in theirs["seen"]]:
        return f"saw {len(names)} numbers, plain torch {len(theirs['seen'])}"
    share = LOSSY_SHARE if is_lossy else 0.0
    for at, ((what, value), (_, wanted)) in enumerate(zip(mine["seen"], theirs["seen"], strict=True)):
        if not isinstance(wanted, Tensor):
            if value != wanted:
                return f"{what}, number {at}: {value}, plain torch {wanted}"
        elif says := beyond(value, wanted, MARGIN * reference.seen[at] + (ROUNDOFF + share) * largest(wanted)):
            return f"{what}, number {at}: {says}"
    for spread, (before, mine_after), (_, after) in zip(
        reference.models, mine["models"], theirs["models"], strict=True
    ):
        for name, wanted in after.items():
            moved = distance(wanted, before[name])
            copied = OF_COPY if reference.is_narrow else ROUNDOFF
            slack = MARGIN * spread[name] + copied * largest(wanted) + share * moved
            if says := beyond(mine_after.get(name), wanted, slack):
                return f"{name}: {says}; its update is at most {moved:.3g}"
    return ""


def largest(value: Tensor) -> float:
    return float(value.detach().float().abs().max()) if value.numel() else 0.0


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; NaN is nowhere near."""
    off = torch.nan_to_num((one.float() - other.float()).abs(), nan=torch.inf)
    return float(off.max()) if off.numel() else 0.0


def beyond(mine: Any, wanted: Tensor, slack: float) -> str:
    """Whether a tensor is further from the reference than `slack`."""
    if not isinstance(mine, Tensor) or mine.shape != wanted.shape:
        return f"is {tuple(mine.shape) if isinstance(mine, Tensor) else mine}, not of shape {tuple(wanted.shape)}"
    worst = distance(mine, wanted)
    if bool(torch.isnan(wanted).any()):
        return "plain torch itself has NaN"
    return f"off by {worst:.3g}, {slack:.3g} at most" if worst > slack else ""
