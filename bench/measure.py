"""The whole of one `zerokern bench`: every contest of an op, with its context."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

from .contest import Request
from .in_cache import cycles_per_16
from .ops import KERNELS
from .run import Effort, Outcome, Say, run


@dataclass(frozen=True)
class Measurement:
    """What an op's benchmark found."""

    request: Request
    threads: int
    outcomes: list[Outcome]
    cycles_in_l2: dict[str, float] = field(default_factory=dict)


def measure(
    request: Request, threads: int, effort: Effort, say: Say, advance: Callable[[str, int, int], None]
) -> Measurement:
    """Run the contests of `request.op`; `advance(contest, done, of)` is called after every round."""
    if request.op not in KERNELS:
        raise ValueError(f"op={request.op!r}; allowed: {', '.join(KERNELS)}")
    op = importlib.import_module(f"{__package__}.ops.{request.op}")
    outcomes = []
    for contest in op.contests(request):
        say(f"{contest.name}:")
        outcomes.append(run(contest, threads, effort, say, lambda done, of, name=contest.name: advance(name, done, of)))
        if outcomes[-1].interrupted:
            return Measurement(request, threads, outcomes)
    algorithm = getattr(op, "ALGORITHM", None)
    cycles = cycles_per_16(algorithm) if algorithm is not None else {}
    return Measurement(request, threads, outcomes, cycles)
