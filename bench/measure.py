"""The whole of one `zerokern bench`: every contest of an op, with its context."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .contest import Contest, Request
from .in_cache import cycles_per_16
from .ops import KERNELS
from .run import Effort, Outcome, Say, run
from .timers import whole_contests


@dataclass(frozen=True)
class Measurement:
    """What an op's benchmark found; after what Ctrl-C came, if it did."""

    request: Request
    threads: int
    outcomes: list[Outcome]
    cycles_in_l2: dict[str, float] = field(default_factory=dict)
    interrupted: str = ""


def measure(
    request: Request, threads: int, effort: Effort, say: Say, advance: Callable[[str, int, int], None]
) -> Measurement:
    """Run the contests of `request.op`; `advance(contest, done, of)` is called after every round."""
    if request.op not in KERNELS:
        raise ValueError(f"op={request.op!r}; allowed: {', '.join(KERNELS)}")
    op = importlib.import_module(f"{__package__}.ops.{request.op}")

    def one(contest: Contest) -> Outcome:
        say(f"{contest.name}:")
        return run(contest, threads, effort, say, partial(advance, contest.name))

    contests = [partial(one, contest) for contest in op.contests(request)]
    outcomes, interrupted = whole_contests(contests)
    algorithm = getattr(op, "ALGORITHM", None)
    if interrupted or algorithm is None:
        return Measurement(request, threads, outcomes, interrupted=interrupted)
    try:
        return Measurement(request, threads, outcomes, cycles_per_16(algorithm))
    except KeyboardInterrupt:
        interrupted = f"after {len(outcomes)} of {len(contests)} contests"
        return Measurement(request, threads, outcomes, interrupted=interrupted)
