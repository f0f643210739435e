"""What ranks tell each other when something is wrong, through the group's store: the next step that each of them wants,
what it waits for, whether it failed. Nothing here takes part in a collective, so it works while one hangs."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Board", "Disagreement", "Failure", "Interrupted", "Waiting", "ranks_in_words"]

REMEMBERED = 4096  # steps; whoever deviates is at most a few steps behind
LOOK_S = 0.25  # a rank that waits this long for an agreement reads what the others said


class Failure(NamedTuple):
    """Why a group is at its end, in words that hold on every rank, and who is gone."""

    reason: str
    gone: tuple[int, ...] = ()


class Disagreement(RuntimeError):
    """Ranks that want different things, or one that has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Interrupted(RuntimeError):
    """An agreement that somebody else ended."""


class Waiting:
    """A collective that some rank waits for: the count-th of its kind, moving what `detail` says."""

    __slots__ = ("count", "detail", "kind")

    def __init__(self, kind: str, count: int, detail: str) -> None:
        self.kind, self.count, self.detail = kind, count, detail

    def __str__(self) -> str:
        return f"{self.kind} number {self.count} ({self.detail})"


class Board:
    """One group's page in its store. Each rank writes its own statement and reads those of the others.

    >>> import torch.distributed as dist
    >>> board = Board(dist.HashStore(), rank=0, size=1)
    >>> board.agree("block 1")
    >>> board.position
    1
    """

    def __init__(self, store: Any, rank: int, size: int, patience_s: float = 60.0) -> None:
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.position = 0
        self.lost = False
        self._store = store
        self._said: dict[str, Any] = {}
        self._steps: deque[tuple[int, str, bool]] = deque(maxlen=REMEMBERED)
        self._agreed: tuple[int, str] | None = None
        self._in_trouble = False

    def move(self, store: Any) -> None:
        """Speaks through another store from now on."""
        self._store = store

    def follow(self, key: str) -> None:
        """Counts a step that the recorded order has."""
        self._steps.append((self.position, key, True))
        self.position += 1

    def agree(self, key: str, interrupt: Callable[[], str | None] = lambda: None) -> None:
        """Returns when all ranks want this step at this position; raises Disagreement where they do not.

        `interrupt` is asked now and then; what it returns ends the wait.
        """
        position = self.position
        self._steps.append((position, key, False))
        self.position += 1
        self._say(agree=[position, key])
        self._count(position, key)
        limit, pause = time.monotonic() + self.patience_s, 50e-6
        look = time.monotonic() + LOOK_S
        while not self._store.check([f"ok/{position}"]):
            now = time.monotonic()
            if now >= look:
                look = now + LOOK_S
                self._trouble(True)
                failure = self._deviation(self._said_by_others(), position, key)
                if failure:
                    raise Disagreement(failure)
                reason = interrupt()
                if reason:
                    raise Interrupted(reason)
            if now >= limit:
                raise Disagreement(Failure(self._absent(position, key)))
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        self._trouble(False)
        self._clear(position, key)

    def troubled(self) -> bool:
        """Whether some rank waits long for an agreement; one question to the store."""
        return self._store.check(["trouble"])

    def look(self, waiting: Waiting) -> Failure | None:
        """Says what this rank is stuck in, and looks for the reason. None: nothing is wrong yet."""
        self._say(stuck=[waiting.kind, waiting.count, waiting.detail])
        others = self._said_by_others()
        for said in others.values():
            kind, count, detail = said.get("stuck") or (None, None, None)
            if (kind, count) == (waiting.kind, waiting.count) and detail != waiting.detail:
                return Failure(self._unlike(waiting, {**others, self.rank: self._said}))
        for position, key, followed in list(self._steps):
            if followed and any((said.get("agree") or [None])[0] == position for said in others.values()):
                failure = self._deviation(others, position, key)
                if failure:
                    self._say(agree=[position, key])
                    return failure
                self._join(position, key)
        return _failure(others)

    def failing(self) -> set[int]:
        """Says that this rank gives the group up and looks for the reason; which other ranks have come so far."""
        self._say(failing=True)
        return {rank for rank, said in self._said_by_others().items() if "failing" in said}

    def fail(self, failure: Failure) -> None:
        """Says why this rank gives the group up."""
        self._say(failing=True, failed=[failure.reason, list(failure.gone)])

    def failed(self) -> dict[int, Failure]:
        """Which other ranks have said why."""
        return _failures(self._said_by_others())

    def stuck(self) -> dict[int, str]:
        """What the other ranks waited for when they last waited long."""
        said_by = self._said_by_others()
        return {rank: str(Waiting(*said["stuck"])) for rank, said in said_by.items() if said.get("stuck")}

    def _say(self, **what: Any) -> None:
        if any(self._said.get(name) != value for name, value in what.items()):
            self._said.update(what)
            self._store.set(f"said/{self.rank}", json.dumps(self._said))

    def _said_by_others(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.size):
            name = f"said/{rank}"
            if rank != self.rank and self._store.check([name]):
                found[rank] = json.loads(self._store.get(name))
        return found

    def _trouble(self, there: bool) -> None:
        if there and not self._in_trouble:
            self._store.set("trouble", "1")
        elif self._in_trouble and not there:
            self._store.delete_key("trouble")
        self._in_trouble = there

    def _count(self, position: int, key: str) -> None:
        if self._store.add(_name(position, key), 1) == self.size:
            self._store.set(f"ok/{position}", "1")

    def _join(self, position: int, key: str) -> None:
        """Agrees to a step that this rank has taken already, as its record has it."""
        self._steps = deque(((p, k, f and p != position) for p, k, f in self._steps), maxlen=REMEMBERED)
        self._count(position, key)

    def _clear(self, position: int, key: str) -> None:
        """Forgets the agreement before this one: whoever agreed to this one has left that one."""
        if self._agreed is not None and self.rank == 0:
            before, its_key = self._agreed
            for name in (f"ok/{before}", _name(before, its_key)):
                self._store.delete_key(name)
        self._agreed = (position, key)

    def _deviation(self, others: dict[int, dict[str, Any]], position: int, key: str) -> Failure | None:
        wants = {self.rank: key}
        for rank, said in others.items():
            if (said.get("agree") or [None])[0] == position:
                wants[rank] = said["agree"][1]
        if len(set(wants.values())) == 1:
            return _failure(others)
        return Failure(
            f"ranks differ in step {position} of their order: {_by_value(wants)}. Every rank must run the same modules "
            "in the same order; what a rank does not need it must run all the same, or leave out on all ranks"
        )

    def _absent(self, position: int, key: str) -> str:
        there = [rank for rank, said in self._said_by_others().items() if (said.get("agree") or [None])[0] == position]
        absent = [rank for rank in range(self.size) if rank != self.rank and rank not in there]
        return (
            f"rank {self.rank} wants {key!r} as step {position} of its order; {ranks_in_words(absent)} did not come "
            f"to that step within {self.patience_s:g} s. Every rank must run the same modules in the same order"
        )

    def _unlike(self, waiting: Waiting, said: dict[int, dict[str, Any]]) -> str:
        stuck = {rank: one["stuck"] for rank, one in said.items() if one.get("stuck")}
        sizes = {rank: d for rank, (kind, count, d) in stuck.items() if (kind, count) == (waiting.kind, waiting.count)}
        return (
            f"ranks differ in {waiting.kind} number {waiting.count}: {_by_value(sizes)}. A collective moves the same "
            "on every rank: check that all ranks have the same model, dtype and settings"
        )


def _failures(said_by: dict[int, dict[str, Any]]) -> dict[int, Failure]:
    found = {rank: said["failed"] for rank, said in said_by.items() if "failed" in said}
    return {rank: Failure(reason, tuple(gone)) for rank, (reason, gone) in found.items()}


def _failure(said_by: dict[int, dict[str, Any]]) -> Failure | None:
    return next(iter(_failures(said_by).values()), None)


def _name(position: int, key: str) -> str:
    return f"count/{position}/{zlib.crc32(key.encode()):08x}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> ranks_in_words([2]), ranks_in_words([0, 3]), ranks_in_words(range(9))
    ('rank 2', 'ranks 0 and 3', 'ranks 0, 1, 2, 3, 4, 5 and 3 more')
    """
    listed = [str(rank) for rank in ranks]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > 7:
        listed = [*listed[:6], f"{len(listed) - 6} more"]
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}" if listed else "no rank"


def _by_value(values: dict[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        by_value.setdefault(value, []).append(rank)
    return ", ".join(f"{ranks_in_words(ranks)}: {value!r}" for value, ranks in by_value.items())
