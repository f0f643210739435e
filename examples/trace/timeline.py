"""What ran when, as a few lines of text: each lane a bar, and how much of it lay hidden behind compute.

It takes what the executor's recorder noted and what the simulator predicts: operations with a lane, a begin and an end
on one clock. A step begins with its first forward; what it left to the CPU is drawn where it ran, beside the next one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zerokern.core.errors import got
from zerokern.schedule.intervals import Interval, common, length, union
from zerokern.schedule.program import LANES

__all__ = ["Happened", "Picture", "Row", "hidden", "in_order", "picture", "step_begins"]

LETTERS = {
    "Forward": "F", "Backward": "B", "Publish": "P", "Reduce": "R", "Gather": "G",
    "Fetch": "D", "Norm": "N", "Step": "S", "Store": "U",
}  # fmt: skip
OF_LANES = {  # what rests off the device comes by other lanes, and goes by others
    ("Fetch", "up"): "U", ("Fetch", "read"): "L", ("Store", "write"): "W", ("Store", "down"): "K",
}  # fmt: skip
WORDS = {
    "F": "forward", "B": "backward", "P": "publish", "R": "reduce", "G": "gather",
    "D": "gradients down", "N": "norm", "S": "step", "U": "parameters up",
    "L": "from disk", "W": "to disk", "K": "inputs down",
}  # fmt: skip
COMPUTE = ("Forward", "Backward")
USUAL = ("device", "down", "cpu", "up")
DISK = ("read", "write")
BEHIND = (*USUAL[1:], *DISK)
GOES_ON, IDLE, STEP = "━", "·", "┊"
LEFT, RIGHT = 8, 24
NARROWEST, WIDEST = 60, 400


class Happened(Protocol):
    """One operation: an event of the recorder, or of the simulator."""

    @property
    def step(self) -> int:
        """The step it belongs to."""

    @property
    def lane(self) -> str:
        """Where it ran."""

    @property
    def verb(self) -> str:
        """What was done."""

    @property
    def what(self) -> str:
        """With which span, or "all"."""

    @property
    def begin_ns(self) -> float:
        """When it began."""

    @property
    def end_ns(self) -> float:
        """When it had ended."""

    @property
    def nbytes(self) -> int:
        """What it moved; 0: nothing, or unknown."""


Cell = tuple[str, str]  # a character, and the letter of the verb that it belongs to ("" where nothing ran)


@dataclass(frozen=True)
class Row:
    """One lane: its cells from left to right, the share of the time it was busy, of that beside compute, its rate."""

    lane: str
    cells: tuple[Cell, ...]
    busy: float
    beside: float | None
    gb_s: float | None

    def __str__(self) -> str:
        bar = "".join(character for character, _ in self.cells)
        beside = "" if self.beside is None else f"{self.beside:.0%}"
        rate = "" if self.gb_s is None else f"{self.gb_s:.1f}"
        return f"{self.lane:<{LEFT}}{bar}{self.busy:>7.0%}{beside:>8}{rate:>9}".rstrip()


@dataclass(frozen=True)
class Picture:
    """Steps as text. ``hidden`` is the share of the time of down, cpu and up that lay beside forward and backward."""

    rows: tuple[Row, ...]
    above: tuple[str, ...]
    letters: str
    step_seconds: float
    hidden: float | None

    @property
    def legend(self) -> str:
        """What the letters mean, as many as there are."""
        return "   ".join(f"{letter} {WORDS[letter]}" for letter in self.letters)

    @property
    def summary(self) -> str:
        """How long a step takes, and how much lies hidden."""
        lies = "nothing on" if self.hidden is None else f"{self.hidden:.0%} of the time of"
        lanes = "down, cpu, up and the disk" if any(row.lane in DISK for row in self.rows) else "down, cpu and up"
        return f"{_duration(self.step_seconds * 1e9)} a step; {lies} {lanes} hidden beside forward and backward"

    def __str__(self) -> str:
        lines = [*self.above, *map(str, self.rows), f"{'':<{LEFT}}{self.legend}", self.summary]
        return "\n".join(line.rstrip() for line in lines)


def hidden(events: Iterable[Happened], within: Interval = (-math.inf, math.inf)) -> float | None:
    """The share of the time of down, cpu and up that lies beside forward and backward; None where they did nothing.

    >>> from zerokern.schedule.recorder import Event
    >>> hidden([Event(0, "device", "Forward", "all", 0, 60, 0), Event(0, "down", "Fetch", "all", 40, 80, 8)])
    0.5
    """
    events = list(events)
    compute = _compute(events, within)
    lanes = [_busy((one for one in events if one.lane == lane), within) for lane in BEHIND]
    total = sum(map(length, lanes))
    return sum(length(common(lane, compute)) for lane in lanes) / total if total else None


def picture(events: Iterable[Happened], steps: int = 2, width: int = 100) -> Picture:
    """Draws the last ``steps`` steps, or as many as there are, into lines of at most ``width`` columns.

    A letter begins an operation, and the line behind it is how long it took: ``S━━━━``. A small letter is an operation
    shorter than half a column, shown where nothing else ran. Numbers count the spans in forward order.

    >>> from zerokern.schedule.recorder import Event
    >>> ms = 1_000_000
    >>> events = [
    ...     Event(1, "device", "Forward", "a", 0, 8 * ms, 0),
    ...     Event(1, "device", "Backward", "a", 8 * ms, 24 * ms, 0),
    ...     Event(1, "down", "Fetch", "a", 20 * ms, 26 * ms, 6 * ms),
    ...     Event(1, "cpu", "Step", "a", 26 * ms, 32 * ms, 300 * ms),
    ... ]
    >>> print(picture(events, width=72))
            ╷step 1
            0 ms        10           20          30    busy  hidden     GB/s
    device  F━━━━━━━━━B━━━━━━━━━━━━━━━━━━━··········    75%
    down    ·························D━━━━━━━·······    19%     67%      1.0
    cpu     ································S━━━━━━━    19%      0%     50.0
    up      ········································     0%
            F forward   B backward   D gradients down   S step
    32 ms a step; 33% of the time of down, cpu and up hidden beside forward and backward
    """
    events = in_order(events)
    if not events:
        raise ValueError(got("events", events, "what at least one step did"))
    if not NARROWEST <= width <= WIDEST:
        raise ValueError(got("width", width, f"{NARROWEST} to {WIDEST} columns"))
    if steps < 1:
        raise ValueError(got("steps", steps, "a number of steps, from 1 on"))
    begins = step_begins(events)
    begins, end = _chosen(begins, max(one.end_ns for one in events), steps)
    scale = _Scale(begins, end, width - LEFT - RIGHT)
    within = scale.within
    seen = [one for one in events if one.end_ns > within[0] and one.begin_ns < within[1]]
    numbers = _numbers(events)
    compute = _compute(seen, within)
    lanes = [lane for lane in LANES if lane in USUAL or any(one.lane == lane for one in seen)]
    rows = tuple(_row(lane, [one for one in seen if one.lane == lane], scale, compute, numbers) for lane in lanes)
    found = {letter for row in rows for _, letter in row.cells}
    return Picture(
        rows=rows,
        above=(scale.names(), scale.ruler()),
        letters="".join(letter for letter in WORDS if letter in found),
        step_seconds=(within[1] - within[0]) / len(begins) / 1e9,
        hidden=hidden(seen, within),
    )


class _Scale:
    """Which column a moment lies in."""

    def __init__(self, begins: Sequence[tuple[int, float]], end: float, columns: int) -> None:
        self.begins, self.within, self.columns = begins, (begins[0][1], max(end, begins[0][1] + 1)), columns
        self.per_column = (self.within[1] - self.within[0]) / columns
        self.steps_at = {math.floor(self.column(begin) + 1e-6) for _, begin in begins[1:]}

    def column(self, moment: float) -> float:
        return (moment - self.within[0]) / self.per_column

    def names(self) -> str:
        """A line that says where each step begins."""
        return _written(((self.column(begin), f"╷step {step}") for step, begin in self.begins), self.columns)

    def ruler(self) -> str:
        """A line of round times."""
        span = self.within[1] - self.within[0]
        unit, size = next(((unit, size) for unit, size in _UNITS if span >= 2 * size), _UNITS[-1])
        tick = _round_up(12 * self.per_column / size)
        marks = [(self.column(self.within[0] + i * tick * size), f"{i * tick:g}") for i in range(self.columns)]
        marks = [(at, f"{text} {unit}" if not at else text) for at, text in marks]
        return f"{_written(marks, self.columns):<{LEFT + self.columns}}{'busy':>7}{'hidden':>8}{'GB/s':>9}"


_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))


def _duration(ns: float) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= size), _UNITS[-1])
    return f"{ns / size:.4g} {unit}"


def _round_up(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..., and the same below 1."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _written(marks: Iterable[tuple[float, str]], columns: int) -> str:
    """Texts at columns, those left out that would touch the one before or the end."""
    line = ""
    for at, text in marks:
        column = math.floor(at + 1e-6)
        if (column > len(line) or not line) and column + len(text) <= columns:
            line = f"{line:<{column}}{text}"
    return f"{'':<{LEFT}}{line}"


def in_order(events: Iterable[Happened]) -> list[Happened]:
    """Sorted by begin, then by end.

    >>> from zerokern.schedule.recorder import Event
    >>> late, early = Event(0, "up", "Store", "a", 5, 6, 0), Event(0, "cpu", "Step", "a", 1, 2, 0)
    >>> in_order([late, early]) == [early, late]
    True
    """
    return sorted(events, key=lambda one: (one.begin_ns, one.end_ns))


def step_begins(events: Sequence[Happened]) -> list[tuple[int, float]]:
    """When each step began: with its first forward; where none is told of, with whatever came first.

    >>> from zerokern.schedule.recorder import Event
    >>> step_begins([Event(0, "cpu", "Step", "a", 1, 9, 0), Event(1, "device", "Forward", "a", 4, 9, 0)])
    [(1, 4)]
    """
    told = [one for one in events if one.verb == "Forward"] or events
    first: dict[int, float] = {}
    for one in told:
        first.setdefault(one.step, one.begin_ns)
    return sorted(first.items(), key=lambda item: item[1])


def _chosen(begins: list[tuple[int, float]], last: float, steps: int) -> tuple[list[tuple[int, float]], float]:
    """The last steps that another one follows, which says where they end; of a single step all that there is."""
    if len(begins) <= steps:
        return begins, last
    return begins[-steps - 1 : -1], begins[-1][1]


def _numbers(events: Sequence[Happened]) -> dict[str, int]:
    """Spans in the order of their first forward; what is named otherwise is numbered alike if there are as many."""
    forward = list(dict.fromkeys(one.what for one in events if one.verb == "Forward"))
    others = {one.what for one in events if one.verb in ("Fetch", "Step", "Store")} - set(forward)
    numbers = {what: number for number, what in enumerate(forward)} if len(forward) > 1 else {}
    if len(others) > 1 and len(forward) in (0, 1, len(others)):
        numbers |= {what: number for number, what in enumerate(sorted(others, key=_by_number))}
    return numbers


def _by_number(what: str) -> list[tuple[int, str]]:
    """ "bucket 10" behind "bucket 9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", what)]


def _row(lane: str, ops: Sequence[Happened], scale: _Scale, compute: list[Interval], numbers: dict[str, int]) -> Row:
    busy = _busy(ops, scale.within)
    busy_ns, off_device = length(busy), lane != "device"
    moving = [one for one in ops if one.nbytes]
    nbytes = sum(one.nbytes * _share(one, scale.within) for one in moving)
    moving_ns = length(_busy(moving, scale.within))
    return Row(
        lane=lane,
        cells=tuple(_cells(_runs(ops, busy, scale), scale.steps_at, numbers)),
        busy=busy_ns / (scale.within[1] - scale.within[0]),
        beside=length(common(busy, compute)) / busy_ns if busy_ns and off_device else None,
        gb_s=nbytes / moving_ns if moving_ns and off_device else None,
    )


class _Run(NamedTuple):
    """Columns side by side that belong to one operation, or to none."""

    op: Happened | None
    columns: int
    short: bool = False  # less than half a column


def _runs(ops: Sequence[Happened], busy: list[Interval], scale: _Scale) -> list[_Run]:
    """A column is of the operation that fills most of it; one without any takes the one that it lies in, if free."""
    owners: list[Happened | None] = []
    for column in range(scale.columns):
        begin = scale.within[0] + column * scale.per_column
        cell = (begin, begin + scale.per_column)
        used = length(common(busy, [cell]))
        owners.append(max(ops, key=lambda one: _overlap(one, cell)) if used >= scale.per_column / 2 else None)
    shown = {id(one) for one in owners}
    short = set()
    for one in ops:
        middle = math.floor(scale.column((one.begin_ns + one.end_ns) / 2))
        if id(one) not in shown and 0 <= middle < scale.columns and owners[middle] is None:
            owners[middle] = one
            short.add(id(one))
    found = [list(columns) for _, columns in itertools.groupby(owners, key=id)]
    return [_Run(columns[0], len(columns), id(columns[0]) in short) for columns in found]


def _cells(runs: Sequence[_Run], steps_at: set[int], numbers: dict[str, int]) -> Iterator[Cell]:
    """Numbers stand behind the letters of a verb where there is room for all of them."""
    labels = {run.op.verb: True for run in runs if run.op is not None}
    for run in runs:
        if run.op is not None and run.columns < len(_label(run.op, numbers)):
            labels[run.op.verb] = False
    column = 0
    for run in runs:
        if run.op is None:
            yield from ((STEP if at in steps_at else IDLE, "") for at in range(column, column + run.columns))
        else:
            letter = _letter(run.op)
            label = _label(run.op, numbers) if labels[run.op.verb] else letter
            label = label.lower() if run.short else label
            yield from ((character, letter) for character in f"{label:{GOES_ON}<{run.columns}}")
        column += run.columns


def _letter(one: Happened) -> str:
    return OF_LANES.get((one.verb, one.lane)) or LETTERS.get(one.verb, one.verb[:1])


def _label(one: Happened, numbers: dict[str, int]) -> str:
    whole = one.what if one.what in numbers else one.what.split(" ")[0]  # "3 parameters on disk" are those of "3"
    return f"{_letter(one)}{numbers.get(whole, '')}"


def _overlap(one: Happened, cell: Interval) -> float:
    return min(one.end_ns, cell[1]) - max(one.begin_ns, cell[0])


def _share(one: Happened, within: Interval) -> float:
    """How much of an operation lies within."""
    if one.end_ns <= one.begin_ns:
        return float(within[0] <= one.begin_ns < within[1])
    return max(_overlap(one, within), 0) / (one.end_ns - one.begin_ns)


def _compute(events: Iterable[Happened], within: Interval) -> list[Interval]:
    return _busy((one for one in events if one.lane == "device" and one.verb in COMPUTE), within)


def _busy(ops: Iterable[Happened], within: Interval) -> list[Interval]:
    """When at least one of them ran."""
    return union((max(one.begin_ns, within[0]), min(one.end_ns, within[1])) for one in ops)
