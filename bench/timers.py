"""Speed as a ratio: contestants take turns in one process, and only runs of the same round are compared.

A machine drifts: neighbours use its memory, clocks move. A ratio of two runs that lie next to each other survives
that; two separate measurements do not. So every round runs each contestant once in a fresh order, and the result is
the median of the rounds' ratios with its 95 % interval. No run is thrown away.

Before each run the process must be idle: OpenMP threads spin for milliseconds after a parallel region, on the cores
that the next contestant needs. `settle` waits until this process uses no CPU, whoever was spinning and for how long.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SETTLE_SLICE_S = 0.002
IDLE_CPU_SHARE = 0.15
SETTLE_LIMIT_S = 0.25


class Turns(dict[str, list[T]]):
    """What everyone measured, by name; index i of all lists belongs to round i. `interrupted` says after how many
    rounds Ctrl-C came, be it behind the last; it is empty where none came."""

    interrupted = ""


@dataclass(frozen=True)
class Contestant:
    """What takes turns: `prepare` (its thread count) is not timed, `run` is."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds the true one in 95 of 100 such measurements."""

    median: float
    low: float
    high: float


def settle() -> float:
    """Sleep until this process is idle; returns the share of one CPU that was still busy at the end."""
    deadline = time.perf_counter() + SETTLE_LIMIT_S
    while True:
        busy, started = time.process_time(), time.perf_counter()
        time.sleep(SETTLE_SLICE_S)
        now = time.perf_counter()
        share = (time.process_time() - busy) / (now - started)
        if share < IDLE_CPU_SHARE or now > deadline:
            return share


def run_ns(contestant: Contestant, repeats: int) -> float:
    """One sample: nanoseconds per run, of `repeats` runs back to back."""
    contestant.prepare()
    settle()
    started = time.perf_counter_ns()
    for _ in range(repeats):
        contestant.run()
    return (time.perf_counter_ns() - started) / repeats


def repeats_for(contestant: Contestant, at_least_s: float) -> int:
    """How many runs make a sample long enough that the clock and the call do not matter."""
    contestant.prepare()
    contestant.run()
    started = time.perf_counter_ns()
    contestant.run()
    once_ns = max(1, time.perf_counter_ns() - started)
    return max(1, math.ceil(at_least_s * 1e9 / once_ns))


def interleave(
    contestants: Sequence[Contestant],
    rounds: int,
    *,
    at_least_s: float = 0.004,
    after_round: Callable[[int], None] = lambda done: None,
) -> Turns[float]:
    """Nanoseconds of every contestant in every round.

    Ctrl-C ends it with the rounds that are whole, if there are some.
    """
    repeats = {c.name: repeats_for(c, at_least_s) for c in contestants}
    if len(repeats) != len(contestants):
        raise ValueError(f"contestants={[c.name for c in contestants]}; allowed: each name once")
    times: Turns[float] = Turns({c.name: [] for c in contestants})
    order = random.Random(0)
    gc.collect()
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for done in range(1, rounds + 1):
            for contestant in order.sample(contestants, len(contestants)):
                times[contestant.name].append(run_ns(contestant, repeats[contestant.name]))
            after_round(done)
    except KeyboardInterrupt:
        return whole_rounds(times, rounds)
    finally:
        if gc_was_on:
            gc.enable()
    return times


def whole_rounds(of_each: Mapping[str, list[T]], rounds: int) -> Turns[T]:
    """What was measured until Ctrl-C, without the round that it broke off; where none is whole, it goes on its way.

    >>> whole = whole_rounds({"a": [1, 2], "b": [3]}, 5)
    >>> whole, whole.interrupted
    ({'a': [1], 'b': [3]}, 'after 1 of 5 rounds')
    """
    done = min(map(len, of_each.values()), default=0)
    if not done:
        raise KeyboardInterrupt
    whole: Turns[T] = Turns({name: found[:done] for name, found in of_each.items()})
    whole.interrupted = f"after {done} of {rounds} rounds"
    return whole


def whole_contests(contests: Sequence[Callable[[], T]]) -> tuple[list[T], str]:
    """What they found, one after the other, until Ctrl-C; and after how many it came. Where none is over, it goes on
    its way; one that says itself that it was interrupted is the last.

    >>> def ctrl_c():
    ...     raise KeyboardInterrupt
    >>> whole_contests([int, float, ctrl_c, int])
    ([0, 0.0], 'after 2 of 4 contests')
    """
    found: list[T] = []
    try:
        for contest in contests:
            found.append(contest())
            if when := getattr(found[-1], "interrupted", ""):
                return found, when
    except KeyboardInterrupt:
        if not found:
            raise
        return found, f"after {len(found)} of {len(contests)} contests"
    return found, ""


def median_estimate(values: Iterable[float]) -> Estimate:
    """The median with a 95 % interval from order statistics: no assumption about the distribution.

    >>> median_estimate([3.0, 1.0, 2.0])
    Estimate(median=2.0, low=1.0, high=3.0)
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("values=[]; allowed: at least one")
    outside, rank = 0.5**n, 0
    while rank + 1 < n / 2 and outside + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        outside += math.comb(n, rank) * 0.5**n
    return Estimate(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank])


def paired_ratio(theirs: Sequence[float], ours: Sequence[float]) -> Estimate:
    """Their time over our time, round by round: above 1 we are ahead."""
    return median_estimate(their / our for their, our in zip(theirs, ours, strict=True))
