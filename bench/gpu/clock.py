"""Time on the device, and time that is left.

A sample is the time between two events on the stream, with runs in front of the first one: the GPU is busy when the
clock starts, so that the first launch is as hidden as the others. What the host takes longer for than the GPU is on the
clock of both kinds of contestants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], object]


class Clock(Protocol):
    """Nanoseconds per run."""

    def sample_ns(self, run: Run, repeats: int) -> float: ...


class EventClock:
    """CUDA events around `repeats` runs on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample_ns(self, run: Run, repeats: int) -> float:
        self._stream.synchronize()
        run()
        self._begin.record(self._stream)
        for _ in range(repeats):
            run()
        self._end.record(self._stream)
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e6 / repeats


class RehearsalClock:
    """The host's clock, for a rehearsal: it proves that the code runs, and its numbers are not kept."""

    def sample_ns(self, run: Run, repeats: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        return max(1.0, (time.perf_counter_ns() - started) / repeats)


def repeats_for(clock: Clock, run: Run, at_least_s: float) -> int:
    """How many runs make a sample of that length."""
    return max(1, math.ceil(at_least_s * 1e9 / max(1.0, clock.sample_ns(run, 1))))


class Budget:
    """Seconds that may be spent. Parts of it end earlier; what a part leaves over is there for the others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    def part(self, of: int) -> Budget:
        """One of that many equal parts of what is left."""
        return Budget(max(0.0, self.left) / max(1, of))
