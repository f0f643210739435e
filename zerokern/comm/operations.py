"""Operations between ranks as they are counted and named for messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["UPDATE", "Ledger", "Operation", "during", "phase", "subject"]

UPDATE = "update"  # a wait for another thread of this process, which publishes an update
REMEMBERED = 256  # operations that were begun last, for those who are stuck where this rank has been


class _Thread(threading.local):
    at = ("", "")  # the call that this thread is in, and what collectives within are about


_thread = _Thread()


class during:
    """Context manager that names the public call or hook that this thread is in, for messages if it waits for long.

    The outermost name is used, which the user wrote. `of` names the subject of the collectives within, the same on all
    ranks: those with different subjects never match, even if they move as much. There the innermost is used.

    >>> with during("zk.save"), during("the forward of 'layers.3'", of="unit 'layers.3'"):
    ...     phase(), subject()
    ('zk.save', "unit 'layers.3'")
    """

    __slots__ = ("_before", "_of", "_what")

    def __init__(self, what: str, of: str = "") -> None:
        self._what, self._of = what, of

    def __enter__(self) -> None:
        self._before = before = _thread.at
        _thread.at = (before[0] or self._what, self._of or before[1])

    def __exit__(self, *error: object) -> None:
        _thread.at = self._before


def phase() -> str:
    """Returns the call or hook that this thread is in; empty outside of `during`."""
    return _thread.at[0]


def subject() -> str:
    """Returns what a collective that begins now is about."""
    return _thread.at[1]


class Operation:
    """The `count`-th operation of a kind in a group; `detail` says what it moves.

    `source`: the only rank that has to take part, if there is one. `counted`, `part`: kind and number under which ranks
    count a later round of it.
    """

    __slots__ = ("count", "counted", "detail", "kind", "part", "phase", "source", "thread", "warned")

    def __init__(
        self, kind: str, count: int, detail: str, source: int | None = None, *, counted: str = "", part: int = -1
    ) -> None:
        self.kind, self.count, self.detail, self.source = kind, count, detail, source
        self.counted, self.part = (counted, part) if counted else (kind, count)
        self.phase, self.thread, self.warned = "", 0, False

    def __str__(self) -> str:
        return f"{self.kind} number {self.count} ({self.detail})"

    @property
    def place(self) -> str:
        """What the waiting thread is doing, in the user's words if there are some."""
        return f"{self.phase} ({self})" if self.phase else str(self)


class Ledger:
    """Counts the operations that this process has begun in one process group, by kind. All ranks count alike.

    `pages`: names of the group where processes state what they wait for, of which the last counts; none before all have
    met. `members`: tokens of the processes, by rank; empty where one is not known yet.

    >>> ledger = Ledger(0, 2)
    >>> str(ledger.begin("all_gather", "4 elements")), str(ledger.begin("all_gather", "2 elements")), ledger.counts
    ('all_gather number 0 (4 elements)', 'all_gather number 1 (2 elements)', {'all_gather': 2})
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.pages: list[str] = []
        self.members: list[str] = []
        self.counts: dict[str, int] = {}
        self.record: deque[Operation] = deque(maxlen=REMEMBERED)  # what was begun last
        self.publishing: Callable[[], bool] = lambda: False  # whether a thread may be about to publish
        # those that began what came last; the third what `all_to_all` moves
        self.thread = self.publisher = self.exchanger = threading.main_thread().ident

    def begin(self, kind: str, detail: str, source: int | None = None) -> Operation:
        """Returns the next operation of a kind."""
        count = self._next(kind)
        if kind == "publish":
            self.publisher = threading.get_ident()
        elif kind == "all_to_all":
            self.exchanger = threading.get_ident()
        else:
            self.thread = threading.get_ident()
        about = _thread.at[1]  # `subject()`
        operation = Operation(kind, count, f"{about}: {detail}" if about else detail, source)
        self.record.append(operation)
        return operation

    def again(self, operation: Operation) -> Operation:
        """Returns the second round of an operation."""
        counted = f"{operation.kind}, second round"
        part = self._next(counted)
        return Operation(operation.kind, operation.count, operation.detail, counted=counted, part=part)

    def step(self) -> int:
        """Returns the position of the next step in an order that ranks agree on or have recorded."""
        self.thread = threading.get_ident()
        return self._next("agree")

    def thread_for(self, kind: str) -> int | None:
        """Returns the thread that begins the next operation of a kind."""
        if kind == "all_to_all":
            return self.exchanger
        publishes = kind == UPDATE or (kind == "publish" and self.publishing())
        return self.publisher if publishes else self.thread

    def needed(self, operation: Operation) -> list[str]:
        """Returns tokens of the processes that must begin an operation before a wait for it ends."""
        if operation.counted == UPDATE:
            return self.members[self.rank : self.rank + 1]
        if operation.source is not None and operation.source != self.rank:
            return self.members[operation.source : operation.source + 1]
        return [token for rank, token in enumerate(self.members) if rank != self.rank and token]

    def _next(self, kind: str) -> int:
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        return count
