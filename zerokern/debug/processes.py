"""What each process waits for and has begun, as it tells others through a store; which wait for each other for ever.

A wait ends once all processes that it needs have begun the same operation, and a thread that waits begins nothing. So a
closed chain of such waits, from a process through others back to itself, never ends, however slow anybody is. That does
not depend on when a statement was read: a process that said what it waits for is still there as long as another in the
chain has not begun that operation.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from zerokern.comm.operations import UPDATE, Ledger, Operation, phase

__all__ = ["THIS_PROCESS", "ProcessState"]

_KINDS = ("", "publish", "all_to_all", UPDATE)  # that threads of their own may begin


class ThreadId(NamedTuple):
    """A thread of some process."""

    token: str
    thread: int


class Wait(NamedTuple):
    """A wait of some thread, as its process has stated it."""

    page: str
    counted: str
    number: int
    says: str
    needed: list[str]

    def needs(self, thread_id: ThreadId, statement: dict[str, Any]) -> bool:
        """Returns whether it ends only after that thread has begun the same operation, which it has not."""
        if thread_id.token not in self.needed or self.page in statement["ended"]:
            return False
        begun, threads = statement["begun"].get(self.page, {}), statement["threads"].get(self.page, {})
        thread = threads.get(self.counted, threads.get("", statement["main"]))
        return thread == thread_id.thread and begun.get(self.counted, 0) <= self.number


class ProcessState:
    """What this process waits for and has begun, as it states it to others that share a store with it."""

    def __init__(self, token: str = "") -> None:
        self.store: Any = None
        self.rank = 0  # in the world
        self.known: dict[int, str] = {}  # tokens of other processes, by rank in the world
        self.waits: dict[int, tuple[Ledger, Operation]] = {}  # by thread
        self.last: Operation | None = None  # whose wait has ended
        self.ended: set[str] = set()  # groups that have failed: nobody waits there, and nothing is to come
        self._groups: weakref.WeakSet[Ledger] = weakref.WeakSet()
        self._token, self._process = token, os.getpid() if token else 0
        self._said = ""

    @property
    def token(self) -> str:
        """A name of this process that no other has ever had."""
        if self._process != os.getpid():
            self._token, self._process = secrets.token_hex(8), os.getpid()
            self.waits.clear()
        return self._token

    def join(self, group: Ledger, store: Any, rank: int, page: str, ranks: list[int]) -> None:
        """Starts to state through `store` what this process does in a group of these ranks of the world."""
        self.store, self.rank = store, rank
        self.known[rank] = self.token
        group.pages.append(page)
        group.members = [self.known.get(rank, "") for rank in ranks]
        self._groups.add(group)

    def begin_wait(self, group: Ledger, operation: Operation) -> tuple[Ledger, Operation] | None:
        """Records that the calling thread waits; returns what it waited for before, for `end_wait`."""
        operation.phase, operation.thread = phase(), threading.get_ident()
        before = self.waits.get(operation.thread)
        self.waits[operation.thread] = (group, operation)
        return before

    def end_wait(self, operation: Operation, before: tuple[Ledger, Operation] | None) -> None:
        """Records that the wait has ended, successfully or not."""
        self.last = operation
        if before is None:
            self.waits.pop(operation.thread, None)
        else:
            self.waits[operation.thread] = before

    @contextlib.contextmanager
    def waiting(self, operation: Operation, group: Ledger) -> Iterator[None]:
        """Context manager around a wait."""
        before = self.begin_wait(group, operation)
        try:
            yield
        finally:
            self.end_wait(operation, before)

    def deadlock(self, group: Ledger, operation: Operation) -> tuple[str, bool] | None:
        """Returns why a wait of this process will certainly never end, and whether another process found that.

        All processes in the same deadlock are told as well.
        """
        if self.store is None or not group.pages:
            return None
        mine = self._statement()
        self._say(mine)
        here = ThreadId(self.token, operation.thread)
        own = _waits(mine).get(operation.thread)
        if own is None:
            return None
        told = self.told(group, operation)
        if told is not None:
            return told, True
        caught = self._caught(here, own, mine)
        if len(caught) < 2 or self.waits.get(operation.thread, (None, None))[1] is not operation:
            return None
        reason = (
            f"ranks wait for each other in different collectives, for ever: {_listed(caught, group)}. All ranks make "
            "the same collective calls in the same order: what one rank alone is to do must not be one of them"
        )
        for place, (wait, _) in caught.items():
            if place.token != self.token:
                self.store.set(_told(place.token), json.dumps([wait.page, wait.counted, wait.number, reason]))
        return reason, False

    def _caught(self, here: ThreadId, own: Wait, mine: dict[str, Any]) -> dict[ThreadId, tuple[Wait, int]]:
        """Returns this wait and all waits of a deadlock that it is part of; nothing else if there is none."""
        statements = {self.token: mine}
        waits: dict[ThreadId, Wait] = {}
        asked = [self.token, *own.needed]
        for token in asked:
            statement = statements[token] = mine if token == self.token else self._read(token)
            for thread, wait in _waits(statement).items():
                if wait.page not in statement["ended"]:
                    waits[ThreadId(token, thread)] = wait
                    asked += [needed for needed in wait.needed if needed not in asked]
        caught = {here: (own, self.rank)}
        grown = 0
        while grown < len(caught):
            grown = len(caught)
            for place, wait in waits.items():
                if place not in caught and any(
                    wait.needs(thread_id, statements[thread_id.token]) for thread_id in caught
                ):
                    caught[place] = (wait, statements[place.token]["rank"])
        closed = any(place != here and own.needs(place, statements[place.token]) for place in caught)
        return caught if closed else {}

    def _statement(self) -> dict[str, Any]:
        # waits are read before counts: what had been begun when a wait began is in these then
        waits = {
            str(thread): [group.pages[-1], wait.counted, wait.part, wait.place, group.needed(wait)]
            for thread, (group, wait) in self.waits.copy().items()
            if group.pages
        }
        groups = [(page, group) for group in list(self._groups) for page in group.pages]
        return {
            "rank": self.rank,
            "main": threading.main_thread().ident,
            "last": self.last.place if self.last is not None else "",
            "waits": waits,
            "ended": sorted(self.ended),
            "begun": {page: dict(group.counts) for page, group in groups},
            "threads": {page: {k: group.thread_for(k) for k in _KINDS} for page, group in groups},
        }

    def say(self) -> None:
        """States what this process does, for other processes to read."""
        if self.store is not None:
            self._say(self._statement())

    def others(self, group: Ledger, operation: Operation) -> dict[int, tuple[str, bool]]:
        """Returns ranks that have not begun an operation that this process waits for: where each of them last was, and
        whether it waits there."""
        missing: dict[int, tuple[str, bool]] = {}
        if self.store is None or not group.pages:
            return {rank: ("", False) for rank in range(group.size) if rank != group.rank}
        for rank, token in enumerate(group.members):
            statement = self._read(token)
            begun = statement["begun"].get(group.pages[-1], {}).get(operation.counted, 0) > operation.part
            if rank != group.rank and operation.source in (None, group.rank, rank) and not begun:
                wait = next(iter(_waits(statement).values()), None)
                missing[rank] = (statement["last"], False) if wait is None else (wait.says, True)
        return missing

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

    def told(self, group: Ledger, operation: Operation) -> str | None:
        """Returns why this wait will never end, if another process has found out."""
        name = _told(self.token)
        if self.store is None or not group.pages or not self.store.check([name]):
            return None
        *which, reason = json.loads(self.store.get(name))
        return reason if which == [group.pages[-1], operation.counted, operation.part] else None


THIS_PROCESS = ProcessState()


def _waits(statement: dict[str, Any]) -> dict[int, Wait]:
    return {int(thread): Wait(*wait) for thread, wait in statement["waits"].items()}


def _listed(caught: dict[ThreadId, tuple[Wait, int]], group: Ledger) -> str:
    """Describes who waits where, by rank of the group, or of the world for ranks outside of it."""
    lines = []
    for place, (wait, rank) in caught.items():
        inside = place.token in group.members
        number = group.members.index(place.token) if inside else rank
        lines.append((not inside, number, f"rank {number}{'' if inside else ' of the world'} is in {wait.says}"))
    return ", ".join(text for *_, text in sorted(lines))


def _at(token: str) -> str:
    return f"zerokern/at/{token}"


def _told(token: str) -> str:
    return f"zerokern/told/{token}"
