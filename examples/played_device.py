"""A device that is played: streams are threads, its memory is other CPU memory, and everything takes its time.

Work given to it is really done, in the order of its stream and at its time, so whoever reads too early or writes too
early gets other bits than he should. Each stream keeps a clock of its own: what it does begins when what it follows has
ended, by their clocks, so late wake-ups of threads do not add up.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got, one_of
from zerokern.memory import staging
from zerokern.memory.staging import EMULATED_DRIVERS

__all__ = ["PlayedDevice", "PlayedMark", "PlayedStream"]

STREAMS = ("compute", *staging.STREAMS)
RUINS = 0xEE
SPIN_NS = 120_000  # a sleep ends later than asked, by less than this; the rest is spent looking at the clock
MARGIN_NS = 60_000  # what is to be done at an end begins so much before, so that it does not move the end
NAP_NS = 50_000_000
LAG_NS = 10_000_000  # by which a stream may be behind its clock, for want of a core, and make up for it
EXIT_S = 5.0


class PlayedMark:
    """A point in what a stream has been given.

    >>> device = PlayedDevice()
    >>> mark = device.launch(lambda: None, seconds=0.001)
    >>> mark.wait()
    >>> begin_ns, end_ns = mark.times()
    >>> end_ns - begin_ns
    1000000
    >>> device.close()
    """

    def __init__(self, stream: PlayedStream) -> None:
        self._stream = stream
        self._passed = threading.Event()
        self._process = os.getpid()
        self.at_ns = 0  # by the stream's clock
        self._last = (0, 0)

    def wait(self) -> None:
        """Returns once the stream has passed it; raises if the device failed."""
        if not self._passed.is_set():
            if self._process != os.getpid():
                raise StateError("a played device is made of threads, and this process was forked without them")
            self._passed.wait()
        self._stream.device_state.tell()

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return self._passed.is_set()

    def times(self) -> tuple[int, int] | None:
        """When the last work before it began and ended, in ns of `time.perf_counter_ns`; None: it is not there yet."""
        return self._last if self._passed.is_set() else None

    def reach(self) -> None:
        """The stream is here."""
        self.at_ns, self._last = self._stream.clock_ns, self._stream.last
        self._passed.set()

    def hold(self, stream: PlayedStream) -> None:
        """Another stream may not go on before."""
        self._passed.wait()
        stream.clock_ns = max(stream.clock_ns, self.at_ns)


class _State:
    """What the streams of a device share: its failure."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._traceback: TracebackType | None = None

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self._traceback, self.failure = error.__traceback__, error

    def tell(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(self._traceback)


class PlayedStream:
    """A thread that does what it is given, in order. Made by `PlayedDevice.stream`.

    >>> device = PlayedDevice()
    >>> device.stream("down").name, device.stream("up") is device.stream("up")
    ('down', True)
    >>> device.close()
    """

    def __init__(self, name: str, state: _State, stretch: float, seed: int) -> None:
        self.name, self.device_state = name, state
        self.clock_ns = 0
        self.last = (0, 0)  # begin and end of the last work
        self._longest_ns = 0
        self._stretch, self._random = stretch, random.Random(f"{seed} {name}")
        self._given: queue.SimpleQueue[tuple[int, Callable[[PlayedStream], None], bool] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"played {name}", daemon=True)
        self.thread.start()

    def give(self, work: Callable[[PlayedStream], None], always: bool = False) -> None:
        """Queues work; after a failure only what is done `always` is still done, as on a GPU."""
        self._given.put((time.perf_counter_ns(), work, always))

    def end(self) -> None:
        """The thread ends once it has done what it was given."""
        self._given.put(None)

    def pause(self, until_ns: int) -> None:
        """Sleeps, but for the end, which a sleep would miss. Not once the interpreter ends: others wait for that."""
        while threading.main_thread().is_alive():
            left = until_ns - time.perf_counter_ns()
            if left <= 0:
                return
            time.sleep(min(NAP_NS, max(0, left - SPIN_NS)) / 1e9)

    def take(self, seconds: float, early: Callable[[], object] | None, late: Callable[[], object] | None) -> None:
        """Work that lasts so long: something at its begin, something that is done at its end."""
        self.clock_ns = begin = max(self.clock_ns, time.perf_counter_ns() - LAG_NS)
        lasts = int(1e9 * (seconds + self._random.uniform(0, self._stretch)))
        spent = 0 if early is None else _timed(early)
        if late is not None:
            # as long before the end as the begin took, or the longest without one
            guess = spent if early is not None else self._longest_ns
            self.pause(begin + lasts - guess - guess // 2 - MARGIN_NS)
            took = _timed(late)
            spent += took
            if early is None:
                self._longest_ns = max(self._longest_ns, took)
        end = begin + max(lasts, spent)
        self.pause(end)
        self.clock_ns, self.last = end, (begin, end)

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            at_ns, work, always = given
            self.clock_ns = max(self.clock_ns, at_ns)
            if self.device_state.failure is None or always:
                try:
                    work(self)
                except BaseException as error:
                    self.device_state.fail(error)
            del work, given


def _timed(work: Callable[[], object]) -> int:
    """What it took of a core, in ns: that others had it meanwhile makes the device no slower."""
    begin = time.thread_time_ns()
    work()
    return time.thread_time_ns() - begin


class PlayedDevice:
    """`zerokern.memory.copies.Driver` without a device.

    `down_gb_s` and `up_gb_s`: what the link carries to and from the host; None: as fast as memory is. `latency_us`
    comes before each batch of copies. `stretch`: seconds by which work is prolonged at random, for all streams or by
    their names ("compute" and those of `staging.STREAMS`), so that races are lost; `seed` says how. `poison`: what a
    copy is about to fill holds ruins until it is filled. `memory_nbytes`: what it has; `peak_nbytes`: what of that a
    step is told to use at its peak.

    A copy reads and writes one half at its begin and the other at its end.

    >>> from zerokern.memory import Copies
    >>> device = PlayedDevice(down_gb_s=10.0)
    >>> weight, host = device.own(torch.zeros(4)), torch.empty(4)
    >>> mark = device.launch(lambda: weight.fill_(2.0), seconds=0.001)
    >>> with Copies(device) as copies:
    ...     copies.to_host(weight, host).wait()
    >>> host
    tensor([2., 2., 2., 2.])
    >>> device.close()
    """

    device = torch.device("cpu")

    def __init__(
        self,
        down_gb_s: float | None = None,
        up_gb_s: float | None = None,
        latency_us: float = 0.0,
        *,
        stretch: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        poison: bool = False,
        memory_nbytes: int = 80 << 30,
        peak_nbytes: int = 0,
    ) -> None:
        for argument, rate in (("down_gb_s", down_gb_s), ("up_gb_s", up_gb_s)):
            if rate is not None and not rate > 0:
                raise ValueError(got(argument, rate, "GB/s above 0, or None"))
        stretches = dict(stretch) if isinstance(stretch, Mapping) else dict.fromkeys(STREAMS, stretch)
        if latency_us < 0 or min(stretches.values(), default=0) < 0:
            raise ValueError(f"latency_us={latency_us!r} and stretch={stretch!r} must not be below 0")
        if set(stretches) - set(STREAMS):
            raise ValueError(got("stretch", stretch, f"seconds by {', '.join(STREAMS)}"))
        self.poison, self.latency_us = poison, latency_us
        self.memory_nbytes, self.peak_nbytes = memory_nbytes, peak_nbytes
        self._rates = {"down": down_gb_s, "up": up_gb_s}
        self._stretches, self._seed = stretches, seed
        self._process = os.getpid()
        self._state = _State()
        self._streams: list[PlayedStream] = []
        self._named: dict[str, PlayedStream] = {}
        self._naming = threading.Lock()
        self._current = threading.local()
        self.compute = self._new("compute")
        leaving = _Leaving(self._streams)
        atexit.register(leaving.at_exit)
        weakref.finalize(self, leaving.dropped).atexit = False

    def own(self, tensor: Tensor) -> Tensor:
        """Marks a CPU tensor as lying on this device; returns it."""
        EMULATED_DRIVERS[tensor] = self
        return tensor

    def launch(
        self,
        work: Callable[[], object] | None,
        seconds: float = 0.0,
        *,
        late: bool = False,
        ended: Callable[[int, int], object] | None = None,
    ) -> PlayedMark:
        """Queues work on the current stream, which it keeps busy for so long; it is done at the begin, or `late`, at
        the end. `ended` is then told both, in ns."""
        early, at_end = (None, work) if late else (work, None)

        def run(stream: PlayedStream) -> None:
            stream.take(seconds, early, at_end)
            if ended is not None:
                ended(*stream.last)

        self._give(self._this_or_current(None), run)
        return self.mark(None)

    def measure(self) -> None:
        """Marks know when they were passed: they always do."""

    def synchronize(self) -> None:
        """Waits for all streams; raises if the device failed."""
        for mark in [self.mark(stream) for stream in self._streams]:
            mark.wait()

    def close(self) -> None:
        """Ends the threads, once they have done what they were given; raises if the device failed."""
        if self._streams and self.compute.thread.is_alive():
            for stream in self._streams:
                stream.end()
            for stream in self._streams:
                stream.thread.join()
        self._state.tell()

    @property
    def streams(self) -> list[str]:
        """The names of all streams that it has."""
        return [stream.name for stream in self._streams]

    def stream(self, name: str) -> PlayedStream:
        """The stream of this name: "down" is for copies to the host, "up" for copies from it."""
        with self._naming:
            if one_of("name", name, staging.STREAMS) not in self._named:
                self._named[name] = self._new(name)
            return self._named[name]

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """What this thread launches within does not come behind what the program launches: its stream is another."""
        before, self._current.stream = self._this_or_current(None), self.stream(name)
        try:
            yield
        finally:
            self._current.stream = before

    def mark(self, stream: PlayedStream | None) -> PlayedMark:
        """A mark behind everything that the stream has been given; None: the current stream."""
        stream = self._this_or_current(stream)
        mark = PlayedMark(stream)
        self._give(stream, lambda _: mark.reach(), always=True)
        return mark

    def follow(self, stream: PlayedStream | None, mark: Any) -> None:
        """What the stream is given from now on begins when the mark has been passed."""
        self._give(self._this_or_current(stream), mark.hold, always=True)

    def copy(self, stream: PlayedStream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queues copies (dst, src). One thread makes them, and no version counter sees them, as with a device's own."""
        spans = [(dst.data_ptr(), src.data_ptr(), src.numel() * src.itemsize) for dst, src in pairs]
        rate = self._rates.get(stream.name)  # other streams have a few bytes
        seconds = self.latency_us / 1e6 + (0.0 if rate is None else sum(nbytes for *_, nbytes in spans) / rate / 1e9)
        kept = list(pairs)

        def early() -> None:
            for dst, src, nbytes in spans:
                if self.poison:
                    ctypes.memset(dst, RUINS, nbytes)
                ctypes.memmove(dst, src, nbytes // 2)

        def late() -> None:
            for dst, src, nbytes in spans:
                ctypes.memmove(dst + nbytes // 2, src + nbytes // 2, nbytes - nbytes // 2)
            kept.clear()

        self._give(stream, lambda stream: stream.take(seconds, early, late))

    def pinned(self, tensor: Tensor) -> bool:
        """Whether copies to and from this host tensor run beside the program: all do."""
        return True

    def memory(self) -> tuple[int, int]:
        """The bytes that it has, and those that are in use at the peak of a step, as it was told."""
        return self.memory_nbytes, self.peak_nbytes

    def _this_or_current(self, stream: PlayedStream | None) -> PlayedStream:
        """The compute stream is every thread's current one, but where that is `aside`."""
        current: PlayedStream = getattr(self._current, "stream", self.compute)
        return current if stream is None else stream

    def _new(self, name: str) -> PlayedStream:
        stream = PlayedStream(name, self._state, self._stretches.get(name, 0.0), self._seed + len(self._streams))
        self._streams.append(stream)
        return stream

    def _give(self, stream: PlayedStream, work: Callable[[PlayedStream], None], always: bool = False) -> None:
        if not stream.thread.is_alive():
            gone = "is closed" if self._process == os.getpid() else "is made of threads, and a fork has none of them"
            raise StateError(f"this played device {gone}; make another one")
        stream.give(work, always)


class _Leaving:
    """Ends the threads with the device, or with the interpreter, whichever is first."""

    def __init__(self, streams: list[PlayedStream]) -> None:
        self._streams = streams
        self._process = os.getpid()

    def dropped(self) -> None:
        """From the garbage collector: the threads go when they have done their work, and nobody waits."""
        atexit.unregister(self.at_exit)
        if self._process == os.getpid():
            for stream in self._streams:
                stream.end()

    def at_exit(self) -> None:
        if self._process == os.getpid():
            self.dropped()
            for stream in self._streams:
                stream.thread.join(EXIT_S)
