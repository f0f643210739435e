"""Runs a contest: check everyone, find each peer's best wiring and thread count, then let all take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .contest import Contest, Missing, Provider, WrongResult
from .roof import roofs
from .timers import Contestant, Estimate, interleave, median_estimate, paired_ratio

Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much time to spend: rounds of the contest, the shortest sample, and the search for each peer's best."""

    pairs: int = 60
    at_least_s: float = 0.004
    trials: int = 5
    all_thread_counts: bool = True


SMOKE = Effort(pairs=3, at_least_s=0.0, trials=1, all_thread_counts=False)


@dataclass(frozen=True)
class Row:
    """One provider's result: times are per run, ratios are peer time over our time."""

    name: str
    ns: Estimate
    nbytes: float
    numel: int
    lossy: str
    roof_share: float
    ratio: dict[str, Estimate]
    is_peer: bool = False

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.ns.median

    @property
    def ns_per_param(self) -> float:
        return self.ns.median / self.numel


@dataclass(frozen=True)
class Outcome:
    """A contest's rows, how each peer competed, who was missing and why, which of the roofs was the highest; after how
    many rounds Ctrl-C came."""

    name: str
    rows: list[Row]
    chosen: dict[str, dict[str, object]]
    missing: dict[str, str]
    roof: str
    roof_gb_s: dict[str, float]
    interrupted: str = ""


def run(contest: Contest, threads: int, effort: Effort, say: Say, advance: Callable[[int, int], None]) -> Outcome:
    """`say` hears what happens, `advance(done, of)` each round."""
    for provider in contest.ours:
        provider.use_threads(threads)
        provider.check()
        say(f"{provider.name}: the result is right")
    missing: dict[str, str] = {}
    best: dict[str, tuple[Provider, int]] = {}
    for peer, make in contest.peers.items():
        try:
            best[peer] = _best(peer, make, threads, effort, say)
        except Missing as reason:
            missing[peer] = str(reason)
            say(f"{peer}: missing, {reason}")
    patterns = [provider.streams for provider in contest.ours]
    ceilings = roofs(patterns, max(provider.resident_nbytes for provider in contest.ours))
    entries = [_contestant(f"ours: {p.name}", p, threads) for p in contest.ours]
    entries += [_contestant(f"peer: {peer}", provider, count) for peer, (provider, count) in best.items()]
    entries += [_contestant(f"roof: {p.name}", p, threads) for p in ceilings]
    times = interleave(
        entries, effort.pairs, at_least_s=effort.at_least_s, after_round=lambda done: advance(done, effort.pairs)
    )
    rates = {p.name: [p.nbytes / ns for ns in times[f"roof: {p.name}"]] for p in ceilings}
    roof = max(rates, key=lambda name: statistics.median(rates[name]))
    theirs = {peer: times[f"peer: {peer}"] for peer in best}
    rows = [_row(contest, p, times[f"ours: {p.name}"], rates[roof], theirs) for p in contest.ours]
    rows += [_row(contest, p, theirs[peer], rates[roof], {}, peer) for peer, (p, _) in best.items()]
    return Outcome(
        name=contest.name,
        rows=rows,
        chosen={peer: {"wiring": p.wiring, "threads": count} for peer, (p, count) in best.items()},
        missing=missing,
        roof=roof,
        roof_gb_s={name: statistics.median(values) for name, values in rates.items()},
        interrupted=times.interrupted,
    )


def _contestant(name: str, provider: Provider, threads: int) -> Contestant:
    return Contestant(name, provider.run, lambda: provider.use_threads(threads))


def _best(
    peer: str, make: Callable[[], Sequence[Provider]], threads: int, effort: Effort, say: Say
) -> tuple[Provider, int]:
    """The fastest of a peer's wirings and thread counts, by the median of a few rounds."""
    entries: dict[str, tuple[Provider, int]] = {}
    for provider in make():
        for count in thread_counts(threads) if effort.all_thread_counts else [threads]:
            provider.use_threads(count)
            try:
                provider.check()
            except WrongResult as error:
                raise Missing(f"its result is wrong: {error}") from error
            entries[f"{provider.wiring}, {count} threads"] = (provider, count)
    if not entries:
        raise Missing("it has no wiring for this op")
    if len(entries) == 1:
        return next(iter(entries.values()))
    trial = interleave(
        [_contestant(name, *entry) for name, entry in entries.items()], effort.trials, at_least_s=effort.at_least_s
    )
    if trial.interrupted:
        raise KeyboardInterrupt  # what was found until here is no result
    fastest = min(trial, key=lambda name: statistics.median(trial[name]))
    say(f"{peer}: competes with {fastest}")
    return entries[fastest]


def thread_counts(most: int) -> list[int]:
    """
    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    counts = {most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}
    return sorted(counts)


def _row(
    contest: Contest,
    provider: Provider,
    ns: list[float],
    roof: list[float],
    peers: dict[str, list[float]],
    peer: str = "",
) -> Row:
    shares = (provider.nbytes / time / rate for time, rate in zip(ns, roof, strict=True))
    return Row(
        name=peer or provider.name,
        ns=median_estimate(ns),
        nbytes=provider.nbytes,
        numel=contest.numel,
        lossy=provider.lossy,
        roof_share=median_estimate(shares).median,
        ratio={name: paired_ratio(theirs, ns) for name, theirs in peers.items()},
        is_peer=bool(peer),
    )
