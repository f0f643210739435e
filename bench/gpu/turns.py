"""A contest on the device: everyone is checked, then all take turns, and ratios are formed within rounds.

Differs from `bench.run` in four points: wirings of a peer all compete in every round and the fastest of the whole
contest is the one that we are compared with; one wrong format of ours leaves the others in the contest; a contest
that is late does fewer rounds, and says so; and what is known after some rounds is kept while the others run.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..contest import Missing, Provider, WrongResult
from ..run import Outcome, Row
from ..timers import Estimate, median_estimate
from .clock import Budget, Clock, repeats_for
from .settings import Settings

COPY = (1, 0, 1)
LEAST_ROUNDS = 7  # of fewer no interval is told
FEWEST_ROUNDS = 3  # of a contest that is so late that others lose their time
VERY_LATE = 0.3  # of its time, beyond it
KEPT_EVERY_S = 3.0
Say = Callable[[str], None]
Keep = Callable[[Outcome, int], None]
Make = Callable[[], Sequence[Provider]]


@dataclass
class Contest:
    """Ours and the peers, by name, made when the contest begins. Shares are told of the fastest roof that copies.

    `making_share`: whoever is not made and checked within this share of the contest's time is left out and named.
    """

    name: str
    numel: int
    ours: Mapping[str, Make]
    peers: Mapping[str, Make] = field(default_factory=dict)
    roofs: Make = list
    making_share: float = math.inf


def run(
    contest: Contest,
    settings: Settings,
    clock: Clock,
    budget: Budget,
    say: Say,
    keep: Keep = lambda outcome, done: None,
) -> Outcome:
    """Check, take turns, compare. Who fails is in `missing`, with the reason; raises nothing of a contestant's.

    `keep` gets what is known after so many rounds, from time to time and at the end.
    """
    missing: dict[str, str] = {}
    latest = Budget(math.inf if settings.rehearse else budget.seconds * contest.making_share)

    def ready(who: str, make: Make) -> list[Provider]:
        return _ready(who, make, missing, say, latest)

    ours = [p for who, make in contest.ours.items() for p in ready(who, make)]
    peers = {peer: ready(peer, make) for peer, make in contest.peers.items()}
    roofs = _ready("roof", contest.roofs, missing, say)
    entries = {f"ours: {p.name}": p for p in ours}
    entries.update({f"{peer}: {p.wiring}": p for peer, all_of in peers.items() for p in all_of})
    entries.update({f"roof: {p.name}": p for p in roofs})
    if len(entries) != len(ours) + sum(map(len, peers.values())) + len(roofs):
        raise ValueError(f"contestants of {contest.name}: {list(entries)}; allowed: each name once")

    def after(times: Mapping[str, list[float]], done: int, of: int) -> Outcome:
        outcome = _outcome(contest, ours, peers, roofs, times, missing)
        outcome = dataclasses.replace(outcome, interrupted=f"after {done} of {of} rounds" if done < of else "")
        keep(outcome, done)
        return outcome

    times = take_turns(entries, settings, clock, budget, say, after)
    done = len(next(iter(times.values()), []))
    return after(times, done, done)


def _ready(who: str, make: Make, missing: dict[str, str], say: Say, latest: Budget | None = None) -> list[Provider]:
    """The contestants that can be made and whose result is right; those who come too late are named."""
    ready: list[Provider] = []
    try:
        for provider in make():
            if latest is not None and latest.left < 0:
                missing[_label(who, provider)] = f"late: others took the {latest.seconds:.0f} s for building and checks"
                continue
            try:
                provider.use_threads(1)
                provider.check()
                ready.append(provider)
            except Missing as reason:
                missing[_label(who, provider)] = str(reason)
            except WrongResult as error:
                missing[_label(who, provider)] = f"its result is wrong: {error}"
                say(f"WRONG, and so not timed: {error}")
            except Exception as error:
                missing[_label(who, provider)] = one_line(error)
                say(f"{_label(who, provider)}: cannot run, {one_line(error)}")
    except Missing as reason:
        missing[who] = str(reason)
    except Exception as error:
        missing[who] = one_line(error)
        say(f"{who}: cannot be made, {one_line(error)}")
    return ready


def _label(who: str, provider: Provider) -> str:
    return f"{who}: {provider.wiring}" if provider.wiring and provider.wiring != who else who


def one_line(error: BaseException) -> str:
    """
    >>> one_line(ImportError("no module x" + chr(10) + "  more"))
    'ImportError: no module x'
    """
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]


def take_turns(
    entries: Mapping[str, Provider],
    settings: Settings,
    clock: Clock,
    budget: Budget,
    say: Say,
    after: Callable[[Mapping[str, list[float]], int, int], object] = lambda times, done, of: None,
) -> dict[str, list[float]]:
    """Nanoseconds of everyone in every round; index i of all lists belongs to round i.

    `after` gets the rounds that are over, every few seconds.
    """
    sizes = settings.sizes
    kept = time.monotonic()
    times: dict[str, list[float]] = {name: [] for name in entries}
    if not entries:
        return times
    repeats = {name: repeats_for(clock, p.run, sizes.at_least_s) for name, p in entries.items()}
    order = random.Random(0)
    gc.collect()
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for done in range(sizes.rounds):
            very_late = done >= FEWEST_ROUNDS and budget.left < -VERY_LATE * budget.seconds
            if (done >= min(LEAST_ROUNDS, sizes.rounds) and budget.left <= 0) or very_late:
                say(f"late: {done} rounds instead of {sizes.rounds}")
                break
            if done and time.monotonic() - kept > KEPT_EVERY_S:
                kept = time.monotonic()
                after(times, done, sizes.rounds)
            for name in order.sample(list(entries), len(entries)):
                times[name].append(clock.sample_ns(entries[name].run, repeats[name]))
    finally:
        if gc_was_on:
            gc.enable()
    return times


def _outcome(
    contest: Contest,
    ours: Sequence[Provider],
    peers: Mapping[str, Sequence[Provider]],
    roofs: Sequence[Provider],
    times: Mapping[str, list[float]],
    missing: dict[str, str],
) -> Outcome:
    rates = {p.name: [p.nbytes / ns for ns in times[f"roof: {p.name}"]] for p in roofs}
    middle = {name: statistics.median(rate) for name, rate in rates.items()}
    copies = [p.name for p in roofs if p.streams == COPY]
    roof = max(copies, key=middle.__getitem__, default="")
    theirs = {
        peer: min((times[f"{peer}: {p.wiring}"] for p in wirings), key=statistics.median)
        for peer, wirings in peers.items()
        if wirings
    }
    rows = [_row(contest, p, p.name, times[f"ours: {p.name}"], rates.get(roof), theirs) for p in ours]
    chosen: dict[str, dict[str, object]] = {}
    for peer, wirings in peers.items():
        for p in wirings:
            ns = times[f"{peer}: {p.wiring}"]
            rows.append(_row(contest, p, f"{peer}, {p.wiring}", ns, rates.get(roof), {}, is_peer=True))
            if ns is theirs[peer]:
                chosen[peer] = {"wiring": p.wiring}
    return Outcome(contest.name, rows, chosen, missing, roof, middle)


def _row(
    contest: Contest,
    provider: Provider,
    name: str,
    ns: Sequence[float],
    roof: Sequence[float] | None,
    theirs: Mapping[str, Sequence[float]],
    is_peer: bool = False,
) -> Row:
    shares = [provider.nbytes / time / rate for time, rate in zip(ns, roof, strict=True)] if roof else [float("nan")]
    return Row(
        name=name,
        ns=estimate(ns),
        nbytes=provider.nbytes,
        numel=contest.numel,
        lossy=provider.lossy,
        roof_share=median_estimate(shares).median,
        ratio={
            peer: estimate([their / own for their, own in zip(times, ns, strict=True)])
            for peer, times in theirs.items()
        },
        is_peer=is_peer,
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The median with its 95 % interval; without one, as NaN, where there are fewer than LEAST_ROUNDS values.

    >>> estimate([3.0, 1.0, 2.0])
    Estimate(median=2.0, low=nan, high=nan)
    """
    found = median_estimate(values)
    return found if len(values) >= LEAST_ROUNDS else Estimate(found.median, math.nan, math.nan)


def in_turn(providers: Sequence[Provider]) -> Provider:
    """One contestant over several sets of inputs: each run takes the next one, so that the cache holds none of it."""
    sets = itertools.cycle([p.run for p in providers])

    def check() -> None:
        for provider in providers:
            provider.check()

    return dataclasses.replace(providers[0], run=lambda: next(sets)(), check=check)
