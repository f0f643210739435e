"""A contest of disks: movers that move the bytes of one pattern over one file, in turns."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..contest import Missing, WrongResult
from ..timers import Estimate, Turns, median_estimate, paired_ratio, settle, whole_rounds
from . import usage
from .pattern import GIB, Pattern
from .workfile import Workfile

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pass:
    """What one pass took. `disk_nbytes` is what the kernel counted, `nbytes` what was asked."""

    ns: float
    nbytes: int
    cpu_s: float
    disk_nbytes: int

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.ns

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / self.nbytes * GIB


def measured(nbytes: int, move: Callable[[], object]) -> Pass:
    """A pass of this process."""
    before, started = usage.of_process(), time.perf_counter_ns()
    move()
    ns, used = time.perf_counter_ns() - started, usage.of_process() - before
    return Pass(ns, nbytes, used.cpu_s, used.disk_nbytes)


@dataclass(frozen=True)
class Mover:
    """One way to move the bytes of a pattern, its settings chosen. `check` raises WrongResult.

    `note` says where its work differs from that of the others; `close` gives its memory back.
    """

    name: str
    wiring: str
    run: Callable[[], Pass]
    check: Callable[[], None]
    note: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Task:
    """What a contestant is made for. `trial_nbytes` is how much one trial of its settings moves."""

    pattern: Pattern
    file: Workfile
    trial_nbytes: int
    tune: bool
    say: Say


@dataclass(frozen=True)
class Row:
    """One mover's result. Ratios are peer over ours, in time and in CPU: above 1 we are ahead.

    `disk_share` is bytes at the device over bytes asked; it and `roof_share` are None where nothing reaches the device.
    """

    name: str
    ns: Estimate
    nbytes: float
    cpu_s_per_gib: Estimate
    disk_share: float | None
    roof_share: float | None
    ratio: dict[str, Estimate]
    cpu_ratio: dict[str, Estimate]
    wiring: str = ""
    is_peer: bool = False
    note: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    count: int = 0
    counted: str = ""

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.ns.median

    @property
    def per_s(self) -> float:
        """What is counted (requests, parameters, tickets), per second."""
        return self.count * 1e9 / self.ns.median


@dataclass(frozen=True)
class Outcome:
    """A pattern's rows, who was missing and why, and who was the fastest: the roof, in the same rounds; after how many
    rounds Ctrl-C came."""

    name: str
    rows: list[Row]
    missing: dict[str, str]
    roof: str
    roof_gb_s: float
    interrupted: str = ""


def run(
    task: Task,
    ours: Sequence[Mover],
    peers: Mapping[str, Callable[[], Sequence[Mover]]],
    pairs: int,
    advance: Callable[[int, int], None],
) -> Outcome:
    """Everyone is checked, then everyone runs once a round, in a fresh order."""
    for mover in ours:
        mover.check()
        task.say(f"{mover.name}: {mover.wiring}; the contents are right")
    missing: dict[str, str] = {}
    rivals: list[Mover] = []
    with contextlib.ExitStack() as stack:
        for peer, make in peers.items():
            try:
                found = make()
                for mover in found:
                    stack.callback(mover.close)
                    mover.check()
            except (Missing, WrongResult) as reason:
                missing[peer] = f"its result is wrong: {reason}" if isinstance(reason, WrongResult) else str(reason)
                task.say(f"{peer}: missing, {missing[peer]}")
                continue
            rivals += found
            for mover in found:
                task.say(f"{mover.name}: {mover.wiring}")
        passes = rounds([*ours, *rivals], pairs, lambda done: advance(done, pairs))
    counted = (task.pattern.requests, "requests") if task.pattern.requests else (0, "")
    roof = fastest_of(passes)
    theirs = {mover.name: passes[mover.name] for mover in rivals}
    rows = [row(mover, passes[mover.name], passes[roof], theirs, counted) for mover in ours]
    rows += [row(mover, theirs[mover.name], passes[roof], None, counted) for mover in rivals]
    gb_s = statistics.median(one.gb_s for one in passes[roof])
    return Outcome(task.pattern.name, rows, missing, roof, gb_s, passes.interrupted)


def rounds(movers: Sequence[Mover], pairs: int, after_round: Callable[[int], None]) -> Turns[Pass]:
    """Every mover's passes. Ctrl-C ends it with the rounds that are whole."""
    passes: Turns[Pass] = Turns({mover.name: [] for mover in movers})
    if len(passes) != len(movers):
        raise ValueError(f"movers={[mover.name for mover in movers]}; allowed: each name once")
    order = random.Random(0)
    try:
        for done in range(1, pairs + 1):
            for mover in order.sample(movers, len(movers)):
                settle()
                passes[mover.name].append(mover.run())
            after_round(done)
    except KeyboardInterrupt:
        return whole_rounds(passes, pairs)
    return passes


def fastest_of(passes: Mapping[str, Sequence[Pass]]) -> str:
    return max(passes, key=lambda name: statistics.median(one.gb_s for one in passes[name]))


def row(
    mover: Mover,
    own: Sequence[Pass],
    roof: Sequence[Pass],
    peers: Mapping[str, Sequence[Pass]] | None,
    counted: tuple[int, str] = (0, ""),
) -> Row:
    """The result of `own`, against peers; None makes it the row of a peer."""
    asked = sum(one.nbytes for one in own)
    moved = sum(one.disk_nbytes for one in own)
    against = {} if peers is None else peers
    return Row(
        name=mover.name,
        ns=median_estimate(one.ns for one in own),
        nbytes=asked / len(own),
        cpu_s_per_gib=median_estimate(one.cpu_s_per_gib for one in own),
        disk_share=moved / asked if moved else None,
        roof_share=median_estimate(mine.gb_s / best.gb_s for mine, best in zip(own, roof, strict=True)).median,
        ratio={name: _ratio(found, own, lambda one: 1 / one.gb_s) for name, found in against.items()},
        cpu_ratio={name: _ratio(found, own, lambda one: one.cpu_s_per_gib) for name, found in against.items()},
        wiring=mover.wiring,
        is_peer=peers is None,
        note=mover.note,
        settings=mover.settings,
        count=counted[0],
        counted=counted[1],
    )


def _ratio(theirs: Sequence[Pass], ours: Sequence[Pass], cost: Callable[[Pass], float]) -> Estimate:
    return paired_ratio([cost(one) for one in theirs], [cost(one) for one in ours])
