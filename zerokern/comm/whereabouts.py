"""What each process waits for and what it has begun, and which of them wait for each other for ever.

A wait ends once all whom it waits for have begun the same collective. Who is stuck in another one begins nothing. So a
process that finds a way from itself, from one who waits to one who is waited for, back to itself, knows that none of
them will go on, however slow anybody is. Nothing of this depends on when a statement was read: a rank that said what it
waits for is still there as long as somebody on the way has not begun that.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["UPDATE", "Ledger", "Presence", "Waiting", "during", "phase", "subject"]

REMEMBERED = 256  # of what was begun last, for those who are stuck where this rank has been
UPDATE = "update"  # a wait for another thread of this process, which publishes an update

_here = threading.local()


class during:
    """Around what a public call or a hook does: what this thread is said to be in if it waits for long.

    The outermost counts, for that is what the user wrote. `of` says what the collectives within are about, the same on
    all ranks: those of different things never meet, even where they move as much. There the innermost counts.

    >>> with during("zk.save"), during("the forward of 'layers.3'", of="unit 'layers.3'"):
    ...     phase(), subject()
    ('zk.save', "unit 'layers.3'")
    """

    __slots__ = ("_before", "_of", "_what")

    def __init__(self, what: str, of: str = "") -> None:
        self._what, self._of = what, of

    def __enter__(self) -> None:
        self._before = before = getattr(_here, "at", ("", ""))
        _here.at = (before[0] or self._what, self._of or before[1])

    def __exit__(self, *error: object) -> None:
        _here.at = self._before


def phase() -> str:
    """What this thread is in; empty outside of `during`."""
    return getattr(_here, "at", ("", ""))[0]


def subject() -> str:
    """What a collective that is begun now is about."""
    return getattr(_here, "at", ("", ""))[1]


class Waiting:
    """A collective that some rank waits for: the count-th of its kind, moving what `detail` says.

    `source`: the rank that alone is waited for, where it is one. `counted`, `part`: as what ranks count it.
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
        """What the waiting thread is in, in the user's words where there are some."""
        return f"{self.phase} ({self})" if self.phase else str(self)


class Ledger:
    """What this process has begun on one process group: how many collectives of each kind, and in which thread last."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.pages: list[str] = []  # the group's names, of which the last counts: none but one before all have met
        self.members: list[str] = []  # the processes' tokens, by rank; empty where one is not known yet
        self.counts: dict[str, int] = {}
        self.record: deque[Waiting] = deque(maxlen=REMEMBERED)  # of what was begun last
        self.publishing: Callable[[], bool] = lambda: False  # whether a thread may be about to publish
        self._thread = self._publisher = threading.main_thread().ident

    def begin(self, kind: str, detail: str, source: int | None = None) -> Waiting:
        """The next operation of a kind; its number is the same on all ranks."""
        count = self._next(kind)
        if kind == "publish":
            self._publisher = threading.get_ident()
        else:
            self._thread = threading.get_ident()
        about = subject()
        waiting = Waiting(kind, count, f"{about}: {detail}" if about else detail, source)
        self.record.append(waiting)
        return waiting

    def again(self, waiting: Waiting) -> Waiting:
        """The second round of an operation."""
        counted = f"{waiting.kind}, second round"
        return Waiting(waiting.kind, waiting.count, waiting.detail, counted=counted, part=self._next(counted))

    def step(self) -> int:
        """The position of the next step of an order that is agreed on, or was."""
        self._thread = threading.get_ident()
        return self._next("agree")

    def _next(self, kind: str) -> int:
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        return count

    def thread_for(self, kind: str) -> int | None:
        """The thread that begins the next collective of a kind."""
        return self._publisher if kind == UPDATE or (kind == "publish" and self.publishing()) else self._thread

    def needed(self, waiting: Waiting) -> list[str]:
        """The processes that a wait is for."""
        if waiting.counted == UPDATE:
            return self.members[self.rank : self.rank + 1]
        if waiting.source is not None and waiting.source != self.rank:
            return self.members[waiting.source : waiting.source + 1]
        return [token for rank, token in enumerate(self.members) if rank != self.rank and token]


class Spot(NamedTuple):
    """One thread of a process, in a wait."""

    token: str
    thread: int


class Stuck(NamedTuple):
    """A wait as a statement has it."""

    page: str
    counted: str
    number: int
    says: str
    needed: list[str]

    def awaits(self, one: Spot, statement: dict[str, Any]) -> bool:
        """Whether it ends only after that thread has begun the same, which it has not."""
        if one.token not in self.needed or self.page in statement["ended"]:
            return False
        begun, threads = statement["begun"].get(self.page, {}), statement["threads"].get(self.page, {})
        thread = threads.get(self.counted, threads.get("", statement["main"]))
        return thread == one.thread and begun.get(self.counted, 0) <= self.number


class Presence:
    """This process, as others see it who share a store with it."""

    def __init__(self, token: str = "") -> None:
        self.store: Any = None
        self.rank = 0  # in the world
        self.known: dict[int, str] = {}  # tokens of others, by rank in the world
        self.waits: dict[int, tuple[Ledger, Waiting]] = {}  # by thread
        self.last: Waiting | None = None  # that ended
        self.ended: set[str] = set()  # groups that have failed: nobody waits there, or is owed anything
        self._ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
        self._token, self._process = token, os.getpid() if token else 0
        self._said = ""

    @property
    def token(self) -> str:
        """The name of this process, which no other has ever had."""
        if self._process != os.getpid():
            self._token, self._process = secrets.token_hex(8), os.getpid()
            self.waits.clear()
        return self._token

    def join(self, ledger: Ledger, store: Any, rank: int, page: str, ranks: list[int]) -> None:
        """From now on this process says through the store what it does on a group of these ranks of the world."""
        self.store, self.rank = store, rank
        self.known[rank] = self.token
        ledger.pages.append(page)
        ledger.members = [self.known.get(one, "") for one in ranks]
        self._ledgers.add(ledger)

    def enter(self, ledger: Ledger, waiting: Waiting) -> tuple[Ledger, Waiting] | None:
        """The calling thread waits; returns what it waited for before, for `leave`."""
        waiting.phase, waiting.thread = phase(), threading.get_ident()
        before = self.waits.get(waiting.thread)
        self.waits[waiting.thread] = (ledger, waiting)
        return before

    def leave(self, waiting: Waiting, before: tuple[Ledger, Waiting] | None) -> None:
        """The wait is over, well or not."""
        self.last = waiting
        if before is None:
            self.waits.pop(waiting.thread, None)
        else:
            self.waits[waiting.thread] = before

    @contextlib.contextmanager
    def awaiting(self, waiting: Waiting, ledger: Ledger) -> Iterator[None]:
        """Around a wait."""
        before = self.enter(ledger, waiting)
        try:
            yield
        finally:
            self.leave(waiting, before)

    def deadlock(self, ledger: Ledger, waiting: Waiting) -> tuple[str, bool] | None:
        """Why a wait of this process will never end, if that is certain, and whether another process has found that.

        All who are in the same are told as well.
        """
        if self.store is None or not ledger.pages:
            return None
        mine = self._statement()
        self._say(mine)
        here = Spot(self.token, waiting.thread)
        own = _waits(mine).get(waiting.thread)
        if own is None:
            return None
        told = self.told(ledger, waiting)
        if told is not None:
            return told, True
        caught = self._caught(here, own, mine)
        if len(caught) < 2 or self.waits.get(waiting.thread, (None, None))[1] is not waiting:
            return None
        reason = (
            f"ranks wait for each other in different collectives, for ever: {_listed(caught, ledger)}. All ranks make "
            "the same collective calls in the same order: what one rank alone is to do must not be one of them"
        )
        for place, (stuck, _) in caught.items():
            if place.token != self.token:
                self.store.set(_told(place.token), json.dumps([stuck.page, stuck.counted, stuck.number, reason]))
        return reason, False

    def _caught(self, here: Spot, own: Stuck, mine: dict[str, Any]) -> dict[Spot, tuple[Stuck, int]]:
        """This wait, and all that are certain to last as long as it does; none but it where it is not among these."""
        statements = {self.token: mine}
        stuck: dict[Spot, Stuck] = {}
        asked = [self.token, *own.needed]
        for token in asked:
            statement = statements[token] = mine if token == self.token else self._read(token)
            for thread, wait in _waits(statement).items():
                if wait.page not in statement["ended"]:
                    stuck[Spot(token, thread)] = wait
                    asked += [one for one in wait.needed if one not in asked]
        caught = {here: (own, self.rank)}
        grown = 0
        while grown < len(caught):
            grown = len(caught)
            for place, wait in stuck.items():
                if place not in caught and any(wait.awaits(one, statements[one.token]) for one in caught):
                    caught[place] = (wait, statements[place.token]["rank"])
        closed = any(place != here and own.awaits(place, statements[place.token]) for place in caught)
        return caught if closed else {}

    def _statement(self) -> dict[str, Any]:
        # first the waits: what was begun when a wait had lasted until then is what had been begun when it began
        waits = {
            str(thread): [one.pages[-1], wait.counted, wait.part, wait.place, one.needed(wait)]
            for thread, (one, wait) in list(self.waits.items())
            if one.pages
        }
        ledgers = [(page, one) for one in list(self._ledgers) for page in one.pages]
        return {
            "rank": self.rank,
            "main": threading.main_thread().ident,
            "last": self.last.place if self.last is not None else "",
            "waits": waits,
            "ended": sorted(self.ended),
            "begun": {page: dict(one.counts) for page, one in ledgers},
            "threads": {page: {k: one.thread_for(k) for k in ("", "publish", UPDATE)} for page, one in ledgers},
        }

    def say(self) -> None:
        """What this process does, for those who ask."""
        if self.store is not None:
            self._say(self._statement())

    def others(self, ledger: Ledger, waiting: Waiting) -> dict[int, str]:
        """Those who have not begun what this process waits for, by rank, and where they last were, as far as known."""
        found: dict[int, str] = {}
        if self.store is None or not ledger.pages:
            return {rank: "" for rank in range(ledger.size) if rank != ledger.rank}
        for rank, token in enumerate(ledger.members):
            statement = self._read(token)
            begun = statement["begun"].get(ledger.pages[-1], {}).get(waiting.counted, 0) > waiting.part
            if rank != ledger.rank and waiting.source in (None, ledger.rank, rank) and not begun:
                stuck = next(iter(_waits(statement).values()), None)
                found[rank] = stuck.says if stuck is not None else statement["last"]
        return found

    def _say(self, statement: dict[str, Any]) -> None:
        said = json.dumps(statement)
        if said != self._said:
            self._said = said
            self.store.set(_at(self.token), said)

    def _read(self, token: str) -> dict[str, Any]:
        name = _at(token)
        silent: dict[str, Any] = {
            "rank": -1,
            "main": 0,
            "last": "",
            "waits": {},
            "ended": [],
            "begun": {},
            "threads": {},
        }
        return json.loads(self.store.get(name)) if self.store.check([name]) else silent

    def told(self, ledger: Ledger, waiting: Waiting) -> str | None:
        """What another process has found out about this wait."""
        name = _told(self.token)
        if self.store is None or not ledger.pages or not self.store.check([name]):
            return None
        *which, reason = json.loads(self.store.get(name))
        return reason if which == [ledger.pages[-1], waiting.counted, waiting.part] else None


def _waits(statement: dict[str, Any]) -> dict[int, Stuck]:
    return {int(thread): Stuck(*wait) for thread, wait in statement["waits"].items()}


def _listed(caught: dict[Spot, tuple[Stuck, int]], ledger: Ledger) -> str:
    """Who is where, by rank of the group; those outside of it by rank of the world."""
    found = []
    for place, (stuck, rank) in caught.items():
        inside = place.token in ledger.members
        number = ledger.members.index(place.token) if inside else rank
        found.append((not inside, number, f"rank {number}{'' if inside else ' of the world'} is in {stuck.says}"))
    return ", ".join(text for *_, text in sorted(found))


def _at(token: str) -> str:
    return f"zerokern/at/{token}"


def _told(token: str) -> str:
    return f"zerokern/told/{token}"
