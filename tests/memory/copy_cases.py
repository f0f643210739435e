"""A device for the copy tests: streams are threads, device memory is other CPU memory, and everything takes its time.

A copy first ruins its destination, then waits, then reads its source: whoever reads too early gets ruins, whoever
writes too early is copied. A delay for each stream makes every race lose that an order does not exclude.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerokern.memory.staging import Ticket

RUINS = 0xEE
PATIENCE = 120.0


class ThreadMark:
    """A point in a stream."""

    def __init__(self, stream: ThreadStream) -> None:
        self._passed = threading.Event()
        self._stream = stream
        self._error: BaseException | None = None

    def reach(self) -> None:
        self._error = self._stream.error
        self._passed.set()

    def wait(self) -> None:
        assert self._passed.wait(PATIENCE), f"{self._stream.name} never came to its mark"
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._passed.is_set()

    def hold(self) -> None:
        assert self._passed.wait(PATIENCE), f"a stream waits for a mark of {self._stream.name} that never comes"


class ThreadStream:
    """Runs what it is given, in order, each time after a delay. An error stays, as on a GPU."""

    def __init__(self, name: str, delay: float) -> None:
        self.name, self.delay = name, delay
        self.error: BaseException | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.error = self.error or error


class ThreadDriver:
    """`zerokern.memory.copies.Driver` without a device. ``slow`` is the stream that takes its time."""

    device = torch.device("cpu")

    def __init__(self, slow: str = "", delay: float = 0.004) -> None:
        self.slow, self.delay = slow, delay
        self.streams: list[ThreadStream] = []
        self.compute = self._named("compute")
        self.unpinned: list[Tensor] = []
        self.copies: list[tuple[str, int]] = []  # (stream, how many at once)
        self.ran: list[str] = []  # by stream, in the order in which they ended
        self.failing: dict[int, Exception] = {}  # by the number of the copy
        self.refusing: dict[int, BaseException] = {}
        self.struck: Callable[[str], None] = lambda what: None

    def _named(self, name: str) -> ThreadStream:
        stream = ThreadStream(name, self.delay if name == self.slow else 0.0)
        self.streams.append(stream)
        return stream

    def stream(self, name: str) -> ThreadStream:
        return self._named({"down": "out", "up": "in"}[name])

    def mark(self, stream: ThreadStream | None) -> ThreadMark:
        self.struck("mark")
        stream = stream or self.compute
        mark = ThreadMark(stream)
        stream.give(mark.reach)
        return mark

    def follow(self, stream: ThreadStream | None, mark: Ticket) -> None:
        assert isinstance(mark, ThreadMark)
        self.struck("follow")
        (stream or self.compute).give(mark.hold)

    def copy(self, stream: ThreadStream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        number = len(self.copies)
        self.copies.append((stream.name, len(pairs)))
        if number in self.refusing:
            raise self.refusing[number]

        def run() -> None:
            for dst, _ in pairs:
                dst.view(torch.uint8).fill_(RUINS)
            time.sleep(stream.delay)
            if number in self.failing:
                raise self.failing[number]
            for dst, src in pairs:
                dst.view(-1).copy_(src.view(-1))
            self.ran.append(stream.name)

        stream.give(run)
        self.struck("copy")

    def pinned(self, tensor: Tensor) -> bool:
        return not any(tensor.data_ptr() == one.data_ptr() for one in self.unpinned)

    def launch(self, kernel: Callable[[], None]) -> None:
        """A kernel on the current stream."""

        def run() -> None:
            time.sleep(self.compute.delay)
            kernel()

        self.compute.give(run)

    def until(self, reached: Callable[[], bool]) -> None:
        patience = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < patience, f"it never came to that: {self.ran}"
            time.sleep(0.001)

    def end(self) -> None:
        for stream in self.streams:
            stream.end()
