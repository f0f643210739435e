"""The ring that spans of a slow tier pass through, and the one loop that keeps disk and cores busy at the same time;
CUDA streams and events, where copies to and from a GPU are put in order.

Item i lives in slot i % N. While it is computed, the items after it are on their way in and those before it on their
way out. A slot is fetched into again after its store has ended (``after``), never earlier: the tier's engine keeps that
order, so nobody waits here for a store that nobody needs yet.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zerokern.core.errors import BackendError, StateError, got
from zerokern.memory.arena import Arena, Lease
from zerokern.memory.batches import runtime_library
from zerokern.memory.signals import HeldSignals

__all__ = ["CudaDriver", "CudaMark", "Ring", "Slot", "Ticket", "flow", "flowing", "given", "passed", "stream_number"]


class Ticket(Protocol):
    """What fetch and store return: something that ends, well or not."""

    def wait(self) -> None:
        """Returns once it has ended; raises what went wrong."""

    def done(self) -> bool:
        """Whether it has ended."""


@dataclass(eq=False)
class Slot:
    """One cell of a ring. ``drained``: the ticket of the last store from it, until that is known to have ended.

    >>> arena = Arena(1 << 20)
    >>> ring = Ring(arena, slots=2, nbytes=8192, owner="example")
    >>> ring.slots[1].index, ring.slots[1].lease.nbytes, ring.slots[1].drained
    (1, 8192, None)
    >>> ring.close(); arena.close()
    """

    index: int
    lease: Lease
    drained: Ticket | None = None


class Ring:
    """``slots`` leases of ``nbytes`` each, used in turn.

    >>> arena = Arena(1 << 20)
    >>> ring = Ring(arena, slots=3, nbytes=8192, owner="example")
    >>> len(ring.slots), arena.nbytes - arena.free_nbytes
    (3, 24576)
    >>> ring.close(); arena.close()
    """

    def __init__(self, arena: Arena, slots: int, nbytes: int, owner: str) -> None:
        if slots < 1:
            raise ValueError(got("slots", slots, "a whole number from 1 on"))
        self.arena = arena
        self.nbytes = nbytes
        self.flowing = False
        self.slots: list[Slot] = []
        try:
            for index in range(slots):
                self.slots.append(Slot(index, arena.lease(nbytes, f"{owner} slot {index}")))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the leases. Nothing moves in them: flow never leaves anything behind."""
        if self.flowing:
            raise StateError("the ring is in use by flow(), which is not over yet")
        while self.slots:
            self.slots.pop().lease.release()


def flow(
    ring: Ring,
    count: int,
    fetch: Callable[[int, Slot, Ticket | None], Ticket | None],
    compute: Callable[[int, Slot], object],
    store: Callable[[int, Slot], Ticket | None],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Runs items 0 to count - 1 through the ring: fetch, compute, store, each overlapped with those of other items.

    ``fetch(i, slot, after)`` submits and returns a ticket, or None where there is nothing to fetch; the transfer may
    begin only when ``after`` has ended (None: at once), which is for the engine to keep. It must not touch the slot
    itself: ``compute(i, slot)`` may, and is called in order, when both have ended well. ``store(i, slot)`` submits and
    returns a ticket or None. ``progress`` is told how many items are through.

    Returns when everything has ended, and raises not before that: the first error, with the others in its notes.
    Signals are heard between items.

    >>> arena = Arena(1 << 20)
    >>> ring = Ring(arena, slots=2, nbytes=8, owner="example")
    >>> def compute(i, slot):
    ...     print(f"item {i} in slot {slot.index}")
    >>> flow(ring, 3, fetch=lambda i, slot, after: None, compute=compute, store=lambda i, slot: None)
    item 0 in slot 0
    item 1 in slot 1
    item 2 in slot 0
    >>> ring.close(); arena.close()
    """
    with HeldSignals() as signals:
        for _ in flowing(ring, count, fetch, compute, store, progress, signals.deliver):
            pass


def flowing(
    ring: Ring,
    count: int,
    fetch: Callable[[int, Slot, Ticket | None], Ticket | None],
    compute: Callable[[int, Slot], object],
    store: Callable[[int, Slot], Ticket | None],
    progress: Callable[[int], object] | None = None,
    between: Callable[[], object] | None = None,
) -> Generator[int, None, None]:
    """As `flow`, item by item: how many have been computed, while those after them are on their way in.

    The end waits for what is on its way out; `close` breaks it off, and waits for whatever is under way. `between` is
    called before each item. Signals are not held: it is for threads that they do not reach.

    >>> arena = Arena(1 << 20)
    >>> ring = Ring(arena, slots=2, nbytes=8, owner="example")
    >>> fetch = lambda i, slot, after: print(f"fetch {i}")
    >>> two = flowing(ring, 3, fetch, compute=lambda i, slot: None, store=lambda i, slot: None)
    >>> next(two)
    fetch 0
    fetch 1
    fetch 2
    1
    >>> two.close(); ring.close(); arena.close()
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(got("count", count, "a whole number from 0 on"))
    if ring.flowing or not ring.slots:
        raise StateError(
            f"the ring is {'in use by another flow()' if ring.flowing else 'closed'}; make one for this flow"
        )
    ring.flowing = True
    slots, process = ring.slots, os.getpid()
    depth = len(slots)
    fetched: list[Ticket | None] = [None] * depth
    waiting: Ticket | None = None
    try:
        for i, slot in enumerate(slots[:count]):
            fetched[i] = fetch(i, slot, None)
        for i in range(count):
            if between is not None:
                between()
            k = i % depth
            slot = slots[k]
            # The fetch first: it ends after the store before it, so one sleep serves both.
            waiting = fetched[k]
            if waiting is not None:
                waiting.wait()
                fetched[k] = None
            waiting = slot.drained
            if waiting is not None:
                waiting.wait()
                slot.drained = None
            waiting = None
            compute(i, slot)
            slot.drained = store(i, slot)
            if i + depth < count:
                fetched[k] = fetch(i + depth, slot, slot.drained)
            if progress is not None:
                progress(i + 1)
            yield i + 1
        for i in range(max(0, count - depth), count):
            waiting = slots[i % depth].drained
            if waiting is not None:
                waiting.wait()
    except BaseException as first:
        raised_it = waiting if isinstance(first, Exception) else None
        if os.getpid() == process:  # in a forked child nothing of it will end
            _drain([*fetched, *(slot.drained for slot in slots)], raised_it, first)
        raise
    finally:
        for slot in slots:
            slot.drained = None
        ring.flowing = False


def _drain(tickets: list[Ticket | None], raised_it: Ticket | None, first: BaseException) -> None:
    """Waits for all of them, whatever they raise: a transfer that outlives its flow would write to memory of others."""
    for ticket in tickets:
        if ticket is None or (ticket is raised_it and ticket.done()):
            continue
        noted = False
        while True:
            try:
                ticket.wait()
                break
            except BaseException as error:
                if error is not first and not noted:
                    _note(first, error)
                    noted = True
            if ticket.done():
                break
            time.sleep(0.001)


def _note(first: BaseException, other: BaseException) -> None:
    """What ``first.add_note`` does from Python 3.11 on."""
    vars(first)["__notes__"] = [*getattr(first, "__notes__", ()), f"and then {type(other).__name__}: {other}"]


class CudaMark:
    """An event: a point in what a CUDA stream has been given.

    >>> CudaMark.done.__doc__
    'Whether the stream has passed it.'
    """

    def __init__(self, stream: torch.cuda.Stream, clock: _CudaClock | None = None) -> None:
        # who waits sleeps: the cores have an optimizer step to do
        self.event = torch.cuda.Event(blocking=True, enable_timing=clock is not None)
        self.event.record(stream)
        self.begin: CudaMark | None = None  # where the copies began that it stands behind
        self._clock = clock

    def wait(self) -> None:
        """Returns once the stream has passed it; raises if the device failed."""
        self.event.synchronize()

    def done(self) -> bool:
        """Whether the stream has passed it."""
        return bool(self.event.query())

    def times(self) -> tuple[int, int] | None:
        """When the copies before it began and ended (`perf_counter_ns`); None: nobody measures, or not there yet."""
        if self._clock is None or not self.done():
            return None
        end = self._clock.at(self.event)
        return (end if self.begin is None else self._clock.at(self.begin.event)), end


class _CudaClock:
    """Turns events into the host's time: one event whose time both sides know, and what passed since then."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(stream)
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def at(self, event: torch.cuda.Event) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


def stream_number(device: torch.device) -> int:
    """Which stream is current on the device; on a CPU there is one.

    >>> stream_number(torch.device("cpu"))
    0
    """
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def passed(device: torch.device) -> Callable[[], None]:
    """A mark behind what the current stream has been given. Called, it makes the stream that is current then follow.

    >>> passed(torch.device("cpu"))()
    """
    if device.type != "cuda":
        return lambda: None
    mark = CudaMark(torch.cuda.current_stream(device))
    return lambda: torch.cuda.current_stream(device).wait_event(mark.event)


class Ended:
    """The ticket of what has ended before anybody could wait."""

    def wait(self) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """It has ended."""
        return True


def given(device: torch.device) -> Ticket:
    """The ticket of all that the current stream has been given; a CPU has done it already.

    >>> given(torch.device("cpu")).done()
    True
    """
    return CudaMark(torch.cuda.current_stream(device)) if device.type == "cuda" else Ended()


class CudaDriver:
    """Streams, events and copies of one GPU, for `zerokern.memory.Copies`.

    >>> CudaDriver("cpu")
    Traceback (most recent call last):
    ...
    ValueError: device=device(type='cpu') is not possible; allowed: a cuda device
    """

    def __init__(self, device: torch.device | str | int) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(got("device", device, "a cuda device"))
        if not torch.cuda.is_available():
            raise BackendError(f"{device} was asked for, and torch {torch.__version__} finds no GPU on this machine")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._batches = runtime_library()
        self._aside: torch.cuda.Stream | None = None
        self._clock: _CudaClock | None = None
        self._begun: dict[int, CudaMark] = {}

    def measure(self) -> None:
        """From now on marks know when they were passed, and copies when they began."""
        if self._clock is None:
            self._clock = _CudaClock(torch.cuda.current_stream(self.device))

    def stream(self) -> torch.cuda.Stream:
        """A new stream; it does not wait for the legacy default stream."""
        return torch.cuda.Stream(self.device)

    def mark(self, stream: torch.cuda.Stream | None) -> CudaMark:
        """An event behind everything that the stream has been given; None: torch's current stream."""
        stream = self._this_or_current(stream)
        mark = CudaMark(stream, self._clock)
        mark.begin = self._begun.pop(stream.cuda_stream, None)
        return mark

    def follow(self, stream: torch.cuda.Stream | None, mark: CudaMark) -> None:
        """What the stream is given from now on begins when the mark has been passed."""
        self._this_or_current(stream).wait_event(mark.event)

    def copy(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queues copies (dst, src), in any order among themselves."""
        if self._clock is not None:
            self._begun[stream.cuda_stream] = CudaMark(stream, self._clock)
        if self._batches is None:
            with torch.cuda.stream(stream):
                for dst, src in pairs:
                    dst.view(-1).copy_(src.view(-1), non_blocking=True)
            return
        dsts = array("Q", [dst.data_ptr() for dst, _ in pairs])
        srcs = array("Q", [src.data_ptr() for _, src in pairs])
        sizes = array("Q", [src.numel() * src.itemsize for _, src in pairs])
        with torch.cuda.device(self.device):
            self._batches.copy(stream.cuda_stream, dsts, srcs, sizes)

    def aside(self) -> AbstractContextManager[None]:
        """What is launched within does not come behind what the program launches: a stream of its own is current."""
        if self._aside is None:
            self._aside = self.stream()
        return torch.cuda.stream(self._aside)

    def pinned(self, tensor: Tensor) -> bool:
        """Whether CUDA knows the memory: only then does a copy run beside the program."""
        return tensor.is_pinned()

    def _this_or_current(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream is None else stream
