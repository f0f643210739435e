"""A ring buffer that spans of a slow tier pass through, and the loop that overlaps fetch, compute and store.

Item i uses slot i % N. While it is computed, later items are fetched and earlier ones stored. A slot is fetched into
again only after its store has ended (``after``): the tier's engine keeps that order, so the loop does not wait for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType

from zerokern.core.errors import StateError, got, whole_number
from zerokern.memory.arena import Arena, Lease
from zerokern.memory.staging import Ticket

__all__ = ["DeferredSignals", "Ring", "Slot", "flowing"]


@dataclass(eq=False)
class Slot:
    """One slot of a ring. ``drained``: the ticket of the last store from it, until that is known to have ended.

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
    """A ring of ``slots`` leases of ``nbytes`` each, used in turn.

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
        self.waited_ns = 0  # for transfers, since it was made
        self.slots: list[Slot] = []
        try:
            for index in range(slots):
                self.slots.append(Slot(index, arena.lease(nbytes, f"{owner} slot {index}")))
        except BaseException:
            self.close()
            raise

    @classmethod
    def without_memory(cls, slots: int) -> Ring:
        """Makes a ring for items that bring their own memory: `slots` of them are fetched at a time."""
        made = cls.__new__(cls)
        made.nbytes, made.flowing, made.waited_ns = 0, False, 0
        made.slots = [Slot(index, None) for index in range(slots)]  # type: ignore[arg-type]
        return made

    def close(self) -> None:
        """Releases the leases. Nothing moves in them: flow never leaves a transfer behind."""
        if self.flowing:
            raise StateError("the ring is in use by flowing(), which is not over yet")
        while self.slots:
            self.slots.pop().lease.release()


def flowing(
    ring: Ring,
    count: int,
    fetch: Callable[[int, Slot, Ticket | None], Ticket | None],
    compute: Callable[[int, Slot], object],
    store: Callable[[int, Slot], Ticket | None],
    waits_first: bool = False,
    behind: int = 0,
) -> Generator[int, None, None]:
    """Runs items 0 to count - 1 through the ring, each overlapped with others; yields how many have been computed.

    ``fetch(i, slot, after)`` starts a transfer and returns its ticket, or None if there is nothing to fetch; the engine
    starts it when ``after`` has ended (None: at once). It must not touch the slot itself: ``compute(i, slot)`` may, and
    is called in order, when both have ended well. ``store(i, slot)`` returns a ticket or None. `waits_first`: yields
    once more before anything is computed, when the first item is there. `behind`: an item is stored when so many later
    ones have been computed, for a compute that returns before it has ended.

    It ends or raises only when everything has ended: the first error, with the others in its notes. `close` stops it
    early, and waits for all transfers. Signals are not deferred: whoever runs it on the main thread holds them back
    from one item to the next by `DeferredSignals`.

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
    whole_number("count", count, least=0)
    if ring.flowing or not ring.slots:
        raise StateError(
            f"the ring is {'in use by another flowing()' if ring.flowing else 'closed'}; make one for this one"
        )
    ring.flowing = True
    slots, process = ring.slots, os.getpid()
    depth = len(slots)
    behind = min(behind, depth - 1)
    fetched: list[Ticket | None] = [None] * depth
    waiting: Ticket | None = None

    def leave(i: int) -> None:
        slot = slots[i % depth]
        slot.drained = store(i, slot)
        if i + depth < count:
            fetched[i % depth] = fetch(i + depth, slot, slot.drained)

    try:
        for i, slot in enumerate(slots[:count]):
            fetched[i] = fetch(i, slot, None)
        for i in range(count):
            k = i % depth
            slot = slots[k]
            # The fetch first: it ends after the store before it, so one sleep serves both.
            waiting = fetched[k]
            began = time.perf_counter_ns()
            if waiting is not None:
                waiting.wait()
                fetched[k] = None
            waiting = slot.drained
            if waiting is not None:
                waiting.wait()
                slot.drained = None
            ring.waited_ns += time.perf_counter_ns() - began
            waiting = None
            if waits_first and i == 0:
                yield 0
            compute(i, slot)
            if i >= behind:
                leave(i - behind)
            yield i + 1
        for i in range(max(0, count - behind), count):
            leave(i)
        began = time.perf_counter_ns()
        for i in range(max(0, count - depth), count):
            waiting = slots[i % depth].drained
            if waiting is not None:
                waiting.wait()
        ring.waited_ns += time.perf_counter_ns() - began
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
    """Waits for all tickets, whatever they raise: a transfer that outlives its flow would write to others' memory."""
    for ticket in tickets:
        if ticket is None or (ticket is raised_it and ticket.done()):
            continue
        noted = False
        while True:
            try:
                ticket.wait()
                break
            except BaseException as error:
                if error is not first and not noted:  # as `add_note` does from Python 3.11 on
                    notes = getattr(first, "__notes__", ())
                    vars(first)["__notes__"] = [*notes, f"and then {type(error).__name__}: {error}"]
                    noted = True
            if ticket.done():
                break
            time.sleep(0.001)


class DeferredSignals:
    """Context manager that defers signals with Python handlers until ``deliver`` or the end of the block.

    A Ctrl-C between the start of a transfer and the assignment of its ticket would leave nobody to wait for it.

    Python runs handlers only in the main thread; on other threads this does nothing.

    >>> import signal
    >>> with DeferredSignals() as held:
    ...     signal.raise_signal(signal.SIGINT)
    ...     before = "undisturbed"
    ...     try:
    ...         held.deliver()
    ...     except KeyboardInterrupt:
    ...         print(before)
    undisturbed
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, lambda number, frame: self._arrived.append((number, frame)))
            except BaseException:
                self._restore(list(self._handlers))
                raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._restore(list(self._handlers))
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Runs the handlers of the signals that arrived; they may raise, and later ones stay for the next call."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)

    def _restore(self, numbers: list[int]) -> None:
        """Restores the handlers one by one: a restored handler may raise before the others are restored."""
        if numbers:
            try:
                signal.signal(numbers[0], self._handlers[numbers[0]])
            finally:
                self._restore(numbers[1:])
