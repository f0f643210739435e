"""Times a program on a described machine: what runs when, how long a step takes, how much of it is hidden. No torch.

A lane runs one op at a time, in the order of the program, but for the disk's, whose time the model and the update
share; an op begins when its dependencies have ended. Rates change
while an op runs, as other lanes begin and end: links that are slower in both directions, memory that is shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from zerokern.core.errors import whole_number
from zerokern.schedule.intervals import Interval, common, length, union
from zerokern.schedule.machine import Machine
from zerokern.schedule.program import Op, StepProgram
from zerokern.schedule.recorder import Event

__all__ = ["Timeline", "flow_bound", "simulate"]

WARMUP, STEADY = 6, 6  # a program in its steady state repeats every step, or every second or third
BEHIND = ("down", "cpu", "up", "read", "write")
COMPUTE = ("Forward", "Backward")


@dataclass(frozen=True)
class Timeline:
    """What ran when, from the first step on; step time and hidden share are those of the steady state."""

    events: tuple[Event, ...]
    step_seconds: float
    """of a step in the steady state"""
    hidden: float
    """the share of the time of links, cpu and disk that lies beside forward and backward; 1 where they do nothing"""
    busy: Mapping[str, float]
    """the share of a step in which a lane does something"""

    @cached_property
    def seconds(self) -> float:
        """Seconds from the begin of the first event to the end of the last."""
        return (max(event.end_ns for event in self.events) - min(event.begin_ns for event in self.events)) / 1e9


def simulate(program: StepProgram, machine: Machine, steps: int = 4) -> Timeline:
    """Simulates a program that runs again and again, as in a training loop.

    >>> from zerokern.schedule import Span, program_of
    >>> machine = Machine("even", flops_s=1, device_gb_s=1, down_gb_s=1, up_gb_s=1, host_gb_s=1)
    >>> second = 10**9  # the bytes that take one
    >>> span = Span("a", 1, second, second, 2 * second, forward_flops=1, backward_flops=2)
    >>> simulate(program_of("sync", [span]), machine).step_seconds  # 3 compute, 1 down, 1 norm, 2 update, 1 up
    8.0
    """
    whole_number("steps", steps)
    if not program.ops:
        raise ValueError(f"program {program.name!r} has no ops, so that there is nothing to time")
    # the last steps lack what would run beside them
    spans = _Simulation(program, machine, max(steps, WARMUP + STEADY + 2)).finish()
    events = [
        Event(step, op.lane, op.verb, op.what, round(begin * 1e9), round(end * 1e9), op.nbytes, op.turn)
        for step, op, begin, end in spans
        if step < steps
    ]
    last = [max(end for step, _, _, end in spans if step == number) for number in (WARMUP - 1, WARMUP + STEADY - 1)]
    window = (last[0], last[1])
    lanes = {lane: _within(spans, window, lane) for lane in dict.fromkeys(op.lane for op in program.ops)}
    compute = _within(spans, window, "device", COMPUTE)
    behind = [lanes[lane] for lane in BEHIND if lane in lanes]
    total = sum(map(length, behind))
    took = window[1] - window[0]
    return Timeline(
        tuple(sorted(events, key=lambda event: (event.begin_ns, event.step))),
        took / STEADY,
        sum(length(common(lane, compute)) for lane in behind) / total if total else 1.0,
        {lane: length(intervals) / took if took else 0.0 for lane, intervals in lanes.items()},
    )


def flow_bound(program: StepProgram, machine: Machine) -> float:
    """Returns the least seconds per step that dependencies allow: the longest cycle through lanes and dependencies.

    Every op takes as long as it would alone. Any time beyond this bound comes from the order of execution, or from
    shared resources.

    >>> from zerokern.schedule import Delayed, Span, program_of
    >>> machine = Machine("even", flops_s=1, device_gb_s=1, down_gb_s=1, up_gb_s=1, host_gb_s=1)
    >>> span = Span("a", 1, 10**9, step_nbytes=5 * 10**9, forward_flops=1, backward_flops=2)
    >>> [flow_bound(program_of(schedule, [span]), machine) for schedule in ("overlap", Delayed())]
    [10.0, 7.0]
    """
    seconds = [machine.seconds(op) for op in program.ops]
    queues = [_queue(op) for op in program.ops]
    free = dict.fromkeys(queues, 0.0)
    ends: deque[list[float]] = deque(maxlen=1 + max((ref.back for op in program.ops for ref in op.after), default=0))
    latest = []
    for _ in range(WARMUP + STEADY):
        ends.append([])
        for op, queue, taken in zip(program.ops, queues, seconds, strict=True):
            before = (ends[-1 - ref.back][ref.index] for ref in op.after if ref.back < len(ends))
            free[queue] = max(free[queue], *before, 0.0) + taken
            ends[-1].append(free[queue])
        latest.append(max(ends[-1]))
    return (latest[-1] - latest[-1 - STEADY]) / STEADY


def _queue(op: Op) -> tuple[str, bool]:
    """Returns the queue whose ops run one by one. Publishing has its own, because it runs in the thread that waits for
    it; and so has what an update reads and writes of the disk, because its worker asks for that."""
    return (op.lane, op.verb == "Publish" or op.what.endswith(" record"))


Ran = tuple[int, Op, float, float]
"""A step, an op of it, when it began and when it ended, in seconds."""


def _within(spans: Iterable[Ran], window: Interval, lane: str, verbs: Collection[str] | None = None) -> list[Interval]:
    """Returns when ops of a lane ran, within a window."""
    ran = union((begin, end) for _, op, begin, end in spans if op.lane == lane and (verbs is None or op.verb in verbs))
    return common(ran, [window])


class _Simulation:
    """Simulates `steps` runs of a program."""

    def __init__(self, program: StepProgram, machine: Machine, steps: int) -> None:
        self.ops, self.machine, self.steps = program.ops, machine, steps
        order: dict[tuple[str, bool], list[int]] = {}
        for index, op in enumerate(self.ops):
            order.setdefault(_queue(op), []).append(index)
        self.queues = [deque((step, index) for step in range(steps) for index in own) for own in order.values()]
        self.followers: list[list[tuple[int, int]]] = [[] for _ in self.ops]
        self.waits: dict[tuple[int, int], int] = {}
        for index, op in enumerate(self.ops):
            for ref in op.after:
                self.followers[ref.index].append((index, ref.back))
            for step in range(steps):
                self.waits[step, index] = sum(ref.back <= step for ref in op.after)
        self.running: dict[int, tuple[int, int, float, float]] = {}  # queue: step, op, share left, begin
        self.now = 0.0
        self.known: dict[tuple[int, frozenset[str]], float] = {}

    def finish(self) -> list[Ran]:
        ran: list[Ran] = []
        while self._start():
            left = self._left()
            soonest = min(left.values())
            self.now += soonest
            for number, seconds in left.items():
                step, index, share, begin = self.running[number]
                if seconds <= soonest * (1 + 1e-12):
                    del self.running[number]
                    ran.append((step, self.ops[index], begin, self.now))
                    self._release(step, index)
                else:
                    self.running[number] = (step, index, share * (1 - soonest / seconds), begin)
        return ran

    def _start(self) -> bool:
        """Starts the ops that can start; returns whether any op runs."""
        for number, queue in enumerate(self.queues):
            if number not in self.running and queue and not self.waits[queue[0]]:
                self.running[number] = (*queue.popleft(), 1.0, self.now)
        return bool(self.running)

    def _left(self) -> dict[int, float]:
        """Returns, by queue, how long its op would take from now on if nothing else changed."""
        running = [self.ops[index].lane for _, index, _, _ in self.running.values()]
        lanes, disk = frozenset(running), {lane: running.count(lane) for lane in ("read", "write")}
        return {
            number: share * self._seconds(index, lanes) * disk.get(self.ops[index].lane, 1)
            for number, (_, index, share, _) in self.running.items()
        }

    def _seconds(self, index: int, lanes: frozenset[str]) -> float:
        key = (index, lanes)
        if key not in self.known:
            op = self.ops[index]
            self.known[key] = self.machine.seconds(op, lanes - {op.lane})
        return self.known[key]

    def _release(self, step: int, index: int) -> None:
        for follower, back in self.followers[index]:
            if step + back < self.steps:
                self.waits[step + back, follower] -= 1
