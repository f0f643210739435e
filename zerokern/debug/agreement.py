"""What ranks of a group tell each other through a store: the step that each wants, what it waits for, that it failed.

Nothing here takes part in a collective, so it works while one hangs.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zerokern.comm.operations import Ledger, Operation, phase
from zerokern.debug.processes import ProcessState

__all__ = ["Agreement", "Disagreement", "Failure", "ranks_in_words"]

REMEMBERED = 4096  # steps; whoever deviates is at most a few steps behind
LOOK_S = 0.25  # a rank that waits this long for an agreement reads what the others said
LONGEST_S = 4.0  # between two such readings
WARN_S = 30.0  # somebody waits, and may wait on: it is said once, in the log
ASK_S = 10.0  # that it is said after where nobody else has come to a call that all ranks make


class Failure(NamedTuple):
    """Why a group has failed, in words that hold on every rank, and which ranks are gone."""

    reason: str
    gone: tuple[int, ...] = ()
    told: bool = False  # by another rank, which may have ended since


class Disagreement(RuntimeError):
    """Ranks want different things, or one has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Agreement:
    """One rank's side of what a group tells each other: it writes its own statement and reads those of the others.

    >>> import torch.distributed as dist
    >>> agreement = Agreement(dist.HashStore(), Ledger(0, 1))
    >>> agreement.agree("block 1")
    >>> agreement.position
    1
    """

    def __init__(
        self, store: Any, ledger: Ledger, patience_s: float = 60.0, process: ProcessState | None = None
    ) -> None:
        self.rank, self.size, self.patience_s = ledger.rank, ledger.size, patience_s
        self.ledger, self.process = ledger, process or ProcessState()
        self.lost = False
        self._store = store
        self._said: dict[str, Any] = {}
        self._steps: deque[tuple[int, str, bool]] = deque(maxlen=REMEMBERED)
        self._agreed: tuple[int, str] | None = None
        self._in_trouble = False

    @property
    def position(self) -> int:
        """The number of the next step of the order."""
        return self.ledger.counts.get("agree", 0)

    def move(self, store: Any) -> None:
        """Speaks through another store from now on."""
        self._store = store

    def follow(self, key: str) -> None:
        """Counts a step that the recorded order has."""
        self._steps.append((self.ledger.step(), key, True))

    def agree(self, key: str, interrupt: Callable[[], str | None] = lambda: None) -> None:
        """Returns when all ranks want this step at this position; raises Disagreement where they do not.

        `interrupt` is asked now and then; what it returns ends the wait.
        """
        operation = Operation("agree", self.ledger.step(), repr(key))
        with self.process.waiting(operation, self.ledger):
            self._agree(operation, key, interrupt)

    def _agree(self, operation: Operation, key: str, interrupt: Callable[[], str | None]) -> None:
        position = operation.count
        self._steps.append((position, key, False))
        self._say(agree=[position, key], within=operation.phase)
        self._count(position, key)
        begun, pause, again = time.monotonic(), 50e-6, LOOK_S
        look = begun + LOOK_S
        while not self._store.check([f"ok/{position}"]):
            now = time.monotonic()
            if now >= look:
                look, again = now + again, min(2 * again, LONGEST_S)
                self._trouble(True)
                failure = self._deviation(self._said_by_others(), position, key) or self.look(operation)
                if failure:
                    raise Disagreement(failure)
                reason = interrupt()
                if reason:
                    raise RuntimeError(reason)
                self.warn(operation, now - begun)
            if now >= begun + self.patience_s:
                raise Disagreement(Failure(self._absent(operation, key)))
            time.sleep(pause)
            pause = min(2 * pause, 5e-3 if now < begun + 1 else 50e-3)
        self._trouble(False)
        self._clear(position, key)

    def warn(self, operation: Operation, waited_s: float) -> None:
        """Says once, in the log, whom this rank waits for, and where they last were."""
        if operation.warned or waited_s < min(ASK_S, WARN_S, self.patience_s / 2):
            return
        others, known, question = self.late(operation)
        if not question and waited_s < min(WARN_S, self.patience_s / 2):
            return
        operation.warned = True
        logging.getLogger("zerokern").warning(
            "rank %d has waited %.0f s for %s, in %s%s. It waits on, until the group's timeout of %g s: a slow rank "
            "may be compiling, reading or writing%s",
            self.rank,
            waited_s,
            ranks_in_words(others) if others else "the other ranks",
            operation.place,
            known,
            self.patience_s,
            question,
        )

    def troubled(self) -> bool:
        """Returns whether some rank waits long for an agreement; one question to the store."""
        return self._store.check(["trouble"])

    def look(self, operation: Operation) -> Failure | None:
        """Says what this rank is stuck in, and looks for the reason. None: nothing is wrong yet."""
        self._say(stuck=[operation.kind, operation.count, operation.detail], within=operation.phase)
        others = self._said_by_others()
        for said in others.values():
            kind, count, detail = said.get("stuck") or (None, None, None)
            for mine in list(self.ledger.record):
                if (kind, count) == (mine.kind, mine.count) and detail != mine.detail:
                    return Failure(self._unlike(mine, operation.phase, others))
        for position, key, followed in list(self._steps):
            if followed and any((said.get("agree") or [None])[0] == position for said in others.values()):
                failure = self._deviation(others, position, key)
                if failure:
                    self._say(agree=[position, key], within="")
                    return failure
                self._join(position, key)
        failure = _failure(others)
        if failure is None:
            deadlock = self.process.deadlock(self.ledger, operation)
            failure = Failure(deadlock[0], told=deadlock[1]) if deadlock else None
        return failure

    def failing(self) -> set[int]:
        """Says that this rank gives the group up and looks for the reason; which other ranks have come so far."""
        self._say(failing=True)
        return {rank for rank, said in self._said_by_others().items() if "failing" in said}

    def fail(self, failure: Failure) -> None:
        """Says why this rank gives the group up; who waits for a device's streams alone looks when there is trouble."""
        self._store.set("trouble", "1")
        self._say(failing=True, failed=[failure.reason, list(failure.gone)])

    def failed(self) -> dict[int, Failure]:
        """Returns the other ranks that have stated why they failed."""
        return _failures(self._said_by_others())

    def late(self, operation: Operation) -> tuple[list[int], str, str]:
        """Returns the other ranks that are not known to have begun this; where they last were, and a question to who
        reads that, as ends of a sentence. Nothing is asked where one of them has been in the same call."""
        others = self.process.others(self.ledger, operation)
        known = "".join(
            f"; rank {rank} {'was' if waits else 'waits in no call of zerokern, and was'} last in {where}"
            for rank, (where, waits) in others.items()
            if where
        )
        call = operation.phase
        alone = call.startswith("zk.") and not any(where.startswith(f"{call} ") for where, _ in others.values())
        return list(others), known, f". All ranks must call {call}: is it within `if rank == 0:`?" if alone else ""

    def _say(self, **what: Any) -> None:
        if any(self._said.get(name) != value for name, value in what.items()):
            self._said.update(what)
            self._store.set(f"said/{self.rank}", json.dumps(self._said))

    def _said_by_others(self) -> dict[int, dict[str, Any]]:
        statements = {}
        for rank in range(self.size):
            name = f"said/{rank}"
            if rank != self.rank and self._store.check([name]):
                statements[rank] = json.loads(self._store.get(name))
        return statements

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
        wants, within = {self.rank: key}, {self.rank: phase()}
        for rank, said in others.items():
            if (said.get("agree") or [None])[0] == position:
                wants[rank], within[rank] = said["agree"][1], said.get("within", "")
        if len(set(wants.values())) == 1:
            return _failure(others)
        return Failure(
            f"ranks differ in step {position} of their order: {_by_value(wants, within)}. Every rank must run the same "
            "modules and make the same calls in the same order; what a rank does not need it must run all the same, or "
            f"leave out on all ranks{_about_units(wants.values())}"
        )

    def _absent(self, operation: Operation, key: str) -> str:
        position = operation.count
        there = [rank for rank, said in self._said_by_others().items() if (said.get("agree") or [None])[0] == position]
        absent = [rank for rank in range(self.size) if rank != self.rank and rank not in there]
        _, known, question = self.late(operation)
        return (
            f"rank {self.rank} wants {key!r} as step {position} of its order; {ranks_in_words(absent)} did not come "
            f"to that step within {self.patience_s:g} s{known}"
            f"{question or '. Every rank must run the same modules in the same order'}"
        )

    def _unlike(self, mine: Operation, its_phase: str, others: dict[int, dict[str, Any]]) -> str:
        details, within = {self.rank: mine.detail}, {self.rank: its_phase}
        for rank, said in others.items():
            if said.get("stuck", [])[:2] == [mine.kind, mine.count]:
                details[rank], within[rank] = said["stuck"][2], said["within"]
        return (
            f"ranks differ in {mine.kind} number {mine.count}: {_by_value(details, within)}. A collective moves the "
            "same on every rank: check that all ranks have the same model, dtype and settings, and make the same calls "
            "in the same order"
        )


def _failures(said_by: dict[int, dict[str, Any]]) -> dict[int, Failure]:
    failures = {rank: said["failed"] for rank, said in said_by.items() if "failed" in said}
    return {rank: Failure(reason, tuple(gone)) for rank, (reason, gone) in failures.items()}


def _failure(said_by: dict[int, dict[str, Any]]) -> Failure | None:
    return next(iter(_failures(said_by).values()), None)


def _name(position: int, key: str) -> str:
    return f"count/{position}/{zlib.crc32(key.encode()):08x}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Formats ranks for messages.

    >>> ranks_in_words([2]), ranks_in_words([0, 3]), ranks_in_words(range(9))
    ('rank 2', 'ranks 0 and 3', 'ranks 0, 1, 2, 3, 4, 5 and 3 more')
    """
    listed = [str(rank) for rank in ranks]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > 7:
        listed = [*listed[:6], f"{len(listed) - 6} more"]
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}" if listed else "no rank"


def _about_units(keys: Iterable[str]) -> str:
    """Returns advice for ranks that differ in steps of units."""
    if not any(" of unit " in key for key in keys):
        return ""
    return (
        ". Modules that each rank chooses for itself (experts, blocks that are dropped) are no units of their own: "
        "name the modules around them, zk.shard(model, units=[...])"
    )


def _by_value(values: dict[int, str], within: dict[int, str]) -> str:
    """Describes which ranks have which value."""
    by_value: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        place = within.get(rank) or value
        by_value.setdefault(repr(value) if place == value else f"{place} ({value!r})", []).append(rank)
    return ", ".join(f"{ranks_in_words(ranks)}: {value}" for value, ranks in by_value.items())
