"""What ran when: the executor notes each op here, on the clock of `time.perf_counter_ns`. No torch."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from zerokern.core.errors import got

__all__ = ["Event", "Launched", "Recorder"]

LIMIT = 1 << 16


class Event(NamedTuple):
    """One op that has ended.

    >>> Event(3, "cpu", "Step", "head", 1000, 5000, 4096).end_ns
    5000
    """

    step: int
    lane: str
    verb: str
    what: str
    begin_ns: int
    end_ns: int
    nbytes: int
    turn: int = 0


class Launched:
    """An op that was launched; it becomes an event when its end is known."""

    __slots__ = ("begin_ns", "end_ns", "lane", "nbytes", "step", "turn", "verb", "what")

    def __init__(self, step: int, lane: str, verb: str, what: str, begin_ns: int, nbytes: int, turn: int) -> None:
        self.step, self.lane, self.verb, self.what, self.turn = step, lane, verb, what, turn
        self.begin_ns, self.end_ns, self.nbytes = begin_ns, -1, nbytes


class Recorder:
    """The last `limit` ops. Its methods may be called from any thread.

    A copy's times are those that its ticket gives (`ticket.times()`, a begin and an end in ns); a ticket that has none
    is taken to have run from its launch until somebody saw that it had ended.

    >>> recorder = Recorder()
    >>> recorder.note(1, "cpu", "Step", "head", 1000, 5000)
    >>> recorder.events
    [Event(step=1, lane='cpu', verb='Step', what='head', begin_ns=1000, end_ns=5000, nbytes=0, turn=0)]
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(got("limit", limit, "a whole number of events from 1 on"))
        self._kept: deque[Event | Launched] = deque(maxlen=limit)

    def note(
        self, step: int, lane: str, verb: str, what: str, begin_ns: int, end_ns: int, nbytes: int = 0, turn: int = 0
    ) -> None:
        """Notes an op that has ended."""
        self._kept.append(Event(step, lane, verb, what, begin_ns, end_ns, nbytes, turn))

    def launched(
        self, step: int, lane: str, verb: str, what: str, begin_ns: int, nbytes: int = 0, turn: int = 0
    ) -> Launched:
        """An op that was launched then; `ended` takes what this returns."""
        entry = Launched(step, lane, verb, what, begin_ns, nbytes, turn)
        self._kept.append(entry)
        return entry

    def ended(self, entry: Launched, ticket: Any = None) -> None:
        """The op has ended; its ticket may know its times better."""
        times = getattr(ticket, "times", None)
        known = None if times is None else times()
        if known is None:
            entry.end_ns = time.perf_counter_ns()
        else:
            entry.begin_ns, entry.end_ns = known

    @property
    def events(self) -> list[Event]:
        """What has ended, by its begin."""
        return sorted((_event(one) for one in list(self._kept) if one.end_ns >= 0), key=lambda event: event.begin_ns)

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()


def _event(one: Event | Launched) -> Event:
    if isinstance(one, Event):
        return one
    return Event(one.step, one.lane, one.verb, one.what, one.begin_ns, one.end_ns, one.nbytes, one.turn)
