"""Records when each op ran, on the clock of `time.perf_counter_ns`. No torch."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

__all__ = ["Event", "Recorder", "SpanRecorder", "UpdateRecorder"]

LIMIT = 1 << 16


@dataclass(slots=True, unsafe_hash=True)
class Event:
    """One op that was launched. `end_ns` is -1 until its end is known.

    >>> event = Event(3, "cpu", "Step", "head", 1000, -1, 4096); seen = {event}
    >>> event.end_ns = 5000; event in seen, event == Event(3, "cpu", "Step", "head", 1000, 5000, 4096)
    (True, True)
    """

    # the hash is of what stays: a recorder writes the times when it knows them

    step: int
    lane: str
    verb: str
    what: str
    begin_ns: int = field(hash=False)
    end_ns: int = field(hash=False)
    nbytes: int
    turn: int = 0


class Recorder:
    """Keeps the last `LIMIT` ops. Its methods may be called from any thread.

    A copy's times come from its ticket (`ticket.times()`, begin and end in ns); without them it counts as running from
    its launch until somebody sees that it has ended.

    >>> recorder = Recorder()
    >>> recorder.note(1, "cpu", "Step", "head", 1000, 5000)
    >>> recorder.events
    [Event(step=1, lane='cpu', verb='Step', what='head', begin_ns=1000, end_ns=5000, nbytes=0, turn=0)]
    """

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=LIMIT)
        self._step, self._turns = 1, Counter[tuple[str, str]]()

    def submitted(self, step: int) -> None:
        """Records that a step's program was submitted: ops outside of it belong to the next step from here on."""
        self._step = step + 1
        self._turns.clear()

    def begin(self, lane: str, verb: str, what: str, nbytes: int = 0) -> Event:
        """Records the begin of an op that no executor runs, such as a collective of the model, in the current step."""
        turn = self._turns[verb, what]
        self._turns[verb, what] += 1
        return self.launched(self._step, lane, verb, what, time.perf_counter_ns(), nbytes, turn)

    def begin_within(self, lane: str, verb: str, what: str, nbytes: int) -> Event:
        """Notes that an op of the program that was submitted last begins, as part of the action of another op."""
        return self.launched(self._step - 1, lane, verb, what, time.perf_counter_ns(), nbytes)

    def note(
        self, step: int, lane: str, verb: str, what: str, begin_ns: int, end_ns: int, nbytes: int = 0, turn: int = 0
    ) -> None:
        """Records an op that has ended."""
        self.launched(step, lane, verb, what, begin_ns, nbytes, turn).end_ns = end_ns

    def launched(
        self, step: int, lane: str, verb: str, what: str, begin_ns: int, nbytes: int = 0, turn: int = 0
    ) -> Event:
        """Records an op that was launched at that time; pass the result to `ended`."""
        entry = Event(step, lane, verb, what, begin_ns, -1, nbytes, turn)
        self._kept.append(entry)
        return entry

    def ended(self, entry: Event, ticket: Any = None) -> None:
        """Records the end of an op, at the times that its ticket knows, if it does."""
        times = getattr(ticket, "times", None)
        known = None if times is None else times()
        if known is None:
            entry.end_ns = time.perf_counter_ns()
        else:
            entry.begin_ns, entry.end_ns = known

    @property
    def events(self) -> list[Event]:
        """The ops that have ended, sorted by their begin."""
        ended = (entry for entry in list(self._kept) if entry.end_ns >= 0)
        return sorted(ended, key=lambda event: event.begin_ns)

    def clear(self) -> None:
        """Forgets all ops."""
        self._kept.clear()


class SpanRecorder:
    """Records what a model does with one of its buckets, under the bucket's name in a step program."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self._coming: Event | None = None

    def sent(self, verb: str, nbytes: int, ranks: int, handle: Any, times: int = 1) -> Any:
        """Records a collective of nbytes, until the returned handle has been waited for."""
        if ranks == 1:
            return handle
        sent = times * max(1, nbytes // ranks * (ranks - 1))
        entry = self._recorder.begin("net", verb, self._name, sent)
        if handle is None:
            self._recorder.ended(entry)
            return None
        return _Noted(handle, partial(self._recorder.ended, entry))

    def fetching(self, lane: str, nbytes: int) -> None:
        """Records that the bucket's parameters are being fetched, until `fetched` is called."""
        what = f"{self._name} parameters{' on disk' if lane == 'read' else ''}"
        self._coming = self._recorder.begin(lane, "Fetch", what, nbytes)

    def fetched(self) -> None:
        """Records that the bucket's parameters have arrived."""
        entry, self._coming = self._coming, None
        if entry is not None:
            self._recorder.ended(entry)


class UpdateRecorder:
    """Notes when an update fetches and stores what its spans have on disk: ops of its program, many transfers each.

    `spans`: by turn, the name of the span, and how many bytes of it are read and written.

    >>> recorder = Recorder(); recorder.submitted(1)
    >>> update = UpdateRecorder(recorder, [("head", 8, 0)])
    >>> update.begin("Fetch", 0); update.begin("Fetch", 0); update.end("Fetch", 0)
    >>> update.begin("Store", 0); [(event.verb, event.what, event.nbytes) for event in recorder.events]
    [('Fetch', 'head record', 8)]
    """

    def __init__(self, recorder: Recorder, spans: Sequence[tuple[str, int, int]]) -> None:
        self._recorder, self._spans = recorder, spans
        self._begun: dict[tuple[str, int], Event] = {}

    def begin(self, verb: str, turn: int) -> None:
        """Notes the first transfer of a span."""
        what, read, written = self._spans[turn]
        lane, nbytes = ("read", read) if verb == "Fetch" else ("write", written)
        if nbytes and (verb, turn) not in self._begun:
            self._begun[verb, turn] = self._recorder.begin_within(lane, verb, f"{what} record", nbytes)

    def end(self, verb: str, turn: int) -> None:
        """Notes that the last transfer of a span has ended."""
        entry = self._begun.get((verb, turn))
        if entry is not None and entry.end_ns < 0:
            self._recorder.ended(entry)


class _Noted:
    """A collective's handle that records its end."""

    def __init__(self, handle: Any, ended: Callable[[], None]) -> None:
        self._handle, self._ended = handle, ended

    def wait(self) -> None:
        self._handle.wait()
        self._ended()

    def advance(self) -> bool:
        return bool(self._handle.advance())

    def done(self) -> bool:
        return bool(self._handle.done())
