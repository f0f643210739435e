"""The observer of a process group: finds out why an operation does not end, ends it, and names ranks that are gone."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from zerokern.comm.observer import Observer
from zerokern.comm.operations import UPDATE, Ledger, Operation, phase
from zerokern.core.errors import CommError
from zerokern.debug.agreement import Agreement, Disagreement, Failure, ranks_in_words
from zerokern.debug.processes import THIS_PROCESS

__all__ = ["GroupWatch"]

TICK_S = 0.25
STUCK_S = 0.5
POLL_S = 2.0
LONGEST_S = 4.0  # between two looks at the store
QUIET_S = 5.0  # without a collective
ANSWER_S = 1.0  # what a rank that is still there has for saying that it has failed too
STORE_S = 10.0  # what the store has, all in all
ADORNMENT = re.compile(r"^\[[^\]]*\] ?|\. This is typically.*$", re.DOTALL)


class GroupWatch(Observer):
    """Notes what is waited for, with a thread that wakes now and then to see whether that has lasted long.

    The thread talks to the store only then. It is needed because gloo's wait cannot be interrupted, only ended.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: Any,
        timeout_s: float,
        abort_transfers: Callable[[], None],
        closed: Callable[[], list[int]],
        *,
        polls: bool = False,
    ) -> None:
        super().__init__(ledger, store, timeout_s, abort_transfers, closed, polls=polls)
        self.agreement = Agreement(store, ledger, timeout_s, THIS_PROCESS)
        self._polls = polls
        self._waits: list[tuple[Operation, float]] = []
        self._last: Operation | None = None
        self._thread: threading.Thread | None = None
        self._next_look, self._pause = 0.0, STUCK_S
        self._explaining = False
        self._begun, self._quiet_since = -1, 0.0

    @contextlib.contextmanager
    def meeting(self, group: Any, store: Any, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """Ends with a page of the store that no earlier run has written on.

        Once for each process group: later, one rank may still hold a group that another has let go.
        """
        agreement, process, mine = self.agreement, self.agreement.process, ranks[self.ledger.rank]
        process.join(agreement.ledger, store, mine, name, list(ranks))
        told = group.exchange([secrets.token_hex(8), process.token])
        process.known.update(zip(ranks, (token for _, token in told), strict=True))
        yield
        page = f"{name}/{told[0][0]}"
        agreement.move(dist.PrefixStore(f"zerokern/{page}", store))
        process.join(agreement.ledger, store, mine, page, list(ranks))

    def awaiting_update(self) -> contextlib.AbstractContextManager[None]:
        update = Operation(UPDATE, 0, "of the parameters")
        return self.agreement.process.waiting(update, self.agreement.ledger)

    def _end(self) -> None:
        """Ends all transfers of this group and of those that are tied to it."""
        self._abort_transfers()
        if self.failure is None:
            return
        reason = f"among other ranks that share its model, {self.failure.reason}"
        for other in [tied for tied in list(self._tied) if tied.failure is None]:
            telling = threading.Thread(target=other.fail, args=(reason,), daemon=True)
            telling.start()
            telling.join(STORE_S)

    def waiting(self, operation: Operation) -> contextlib.AbstractContextManager[None]:
        """Context manager around a wait; errors of the transport become errors that name the
        operation and the ranks."""
        return _Wait(self, operation)

    def launched(self, operation: Operation) -> None:
        """Records the last launch on a device, where nobody is seen to wait, and asks the store now and then."""
        self._last = operation
        if self._thread is None:
            self._start()

    def fail(self, reason: str) -> None:
        """Ends the group because this rank cannot continue, and tells the other ranks why, wherever they wait."""
        if self.failure is None:
            self.failure = Failure(f"rank {self.agreement.rank}: {reason}")
            with contextlib.suppress(RuntimeError):
                self.agreement.fail(self.failure)
            self._end()

    def follow(self, key: str) -> None:
        self.agreement.follow(key)

    def check(self, operation: Operation) -> None:
        if self.failure is not None:
            raise self._comm_error(operation, "was not begun, for this group has failed before", self.failure)

    def agree(self, key: str, group: Any) -> None:
        """Does `Agreement.agree`; the group ends if ranks cannot agree."""
        operation = Operation("agree", self.agreement.position, repr(key))
        operation.phase = phase()
        self.check(operation)
        try:
            self.agreement.agree(key, self._interrupted)
        except Disagreement as error:
            self.failure = self.failure or self._cause(operation, error.failure)
            raise self.failed(operation, error) from None
        except RuntimeError as error:
            raise self.failed(operation, error) from error

    def failed(self, operation: Operation, error: RuntimeError) -> CommError:
        """Finds out why a transfer ended, and who is gone; ends all other transfers as well, here and elsewhere."""
        self._explaining = True
        self.agreement.process.ended.update(self.agreement.ledger.pages)
        said = ADORNMENT.sub("", str(error)) or type(error).__name__
        answers: list[Failure] = []
        # a store on a machine that has stopped does not answer, and has no limit of its own
        asking = threading.Thread(target=lambda: answers.append(self._ask(operation, said)), daemon=True)
        asking.start()
        asking.join(STORE_S)
        if self.failure is None:
            silent = f"rank {self.agreement.rank} in {operation}: {said}; the group's store does not answer either"
            self.failure = answers[0] if answers else Failure(silent)
        self._end()
        return self._comm_error(operation, "did not end", self.failure)

    def unlike(self, operation: Operation) -> CommError:
        """Ends the group after data of another request arrived; all ranks see that, and each states its own request."""
        limit = time.monotonic() + ANSWER_S
        with contextlib.suppress(RuntimeError):
            while self.failure is None and time.monotonic() < limit:
                self.failure = self.agreement.look(operation)
                time.sleep(0.05)
        return self.failed(operation, RuntimeError("ranks asked for different things at the same time"))

    def _comm_error(self, operation: Operation, what: str, failure: Failure) -> CommError:
        ranks = tuple(range(self.agreement.size))
        message = f"{operation} of {ranks_in_words(ranks)} {what}: {failure.reason}"
        return CommError(message, operation=operation.kind, ranks=ranks, gone=failure.gone)

    def _ask(self, operation: Operation, said: str) -> Failure:
        """Returns the reason of a failure, and tells it to all other ranks."""
        closed: list[int] = []
        try:
            self.agreement.process.say()
            if self.failure is not None:
                self.agreement.fail(self.failure)
                return self.failure
            closed = self._closed()
            failure = self._inquire(operation, said, closed)
            self.agreement.fail(failure)
            return failure
        except RuntimeError:
            # whoever served the store has most likely closed its connection with this rank first
            return Failure(
                f"{ranks_in_words(closed)} closed the connection, and the store is gone that the ranks talk through: "
                f"with the rank that served it, as a rule rank 0; {said}",
                tuple(closed),
            )

    def _inquire(self, operation: Operation, said: str, closed: list[int]) -> Failure:
        """Finds out which ranks are gone: those that closed their connection and state no failure."""
        agreement = self.agreement
        told = agreement.process.told(agreement.ledger, operation)
        if told is not None:
            return Failure(told)
        limit = time.monotonic() + ANSWER_S
        while set(closed) - agreement.failing() and time.monotonic() < limit:
            time.sleep(0.05)
        failing = agreement.failing()
        gone = tuple(rank for rank in closed if rank not in failing)
        late, known, question = agreement.late(operation)
        if gone:
            are = "is" if len(gone) == 1 else "are"
            return Failure(f"{ranks_in_words(gone)} {are} gone ({said}). Start again from a checkpoint{question}", gone)
        failed = agreement.failed()
        if failed:
            return min(failed.items(), key=lambda item: (not item[1].gone, item[0]))[1]
        if not late:
            return Failure(f"rank {agreement.rank} failed in {operation}: {said}")
        missing = f"{ranks_in_words(late)} did not take part in {operation} in time ({said})"
        return Failure(f"{missing}{known}{question}")

    def _cause(self, operation: Operation, failure: Failure) -> Failure:
        """Returns why ranks differ; if one of them is gone, the others are told that instead."""
        closed = [] if failure.told else self._closed()
        return self._inquire(operation, "its connection is closed", closed) if closed else failure

    def _interrupted(self) -> str | None:
        closed = self._closed()
        return f"{ranks_in_words(closed)} closed the connection" if closed else None

    def _start(self) -> None:
        self._thread = threading.Thread(target=_live, args=(weakref.ref(self),), name="zerokern watch", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Checks all waits once."""
        now = time.monotonic()
        if self._polls:
            stuck, self._pause = [(self._last, now)] if self._last is not None else [], POLL_S
        else:
            stuck = [(operation, since) for operation, since in list(self._waits) if now - since >= STUCK_S]
        if not stuck:
            self._next_look, self._pause = 0.0, STUCK_S
            self._rest(now)
            return
        if now < self._next_look or self.agreement.lost or self.failure is not None or self._explaining:
            return
        self._next_look, self._pause = now + self._pause, min(2 * self._pause, LONGEST_S)
        try:
            for operation, since in stuck:
                failure = self.agreement.look(operation) if not self._polls or self.agreement.troubled() else None
                if failure is not None:
                    failure = self._cause(operation, failure)
                    # before the connections close: whoever is closed and says nothing is gone
                    self.agreement.fail(failure)
                    break
                self.agreement.warn(operation, now - since)
        except RuntimeError:
            self.agreement.lost = True
            return
        if failure is not None and not self._explaining:
            self.failure = failure
            self._end()

    def _rest(self, now: float) -> None:
        """States once where this process was, if nobody in it has waited for long: others may wait for it."""
        begun = sum(self.agreement.ledger.counts.values())
        if begun != self._begun:
            self._begun, self._quiet_since = begun, now
        elif now - self._quiet_since >= QUIET_S and not self.agreement.lost:
            self._quiet_since = math.inf
            try:
                self.agreement.process.say()
            except RuntimeError:
                self.agreement.lost = True


class _Wait:
    """What `GroupWatch.waiting` returns. A class: a generator takes twice the time, for each collective."""

    __slots__ = ("_before", "_entry", "_process", "_watch")

    def __init__(self, watch: GroupWatch, operation: Operation) -> None:
        self._watch, self._process = watch, watch.agreement.process
        self._entry = operation, time.monotonic()

    def __enter__(self) -> None:
        watch, operation = self._watch, self._entry[0]
        if watch.failure is not None:
            watch.check(operation)
        if watch._thread is None:
            watch._start()
        self._before = self._process.begin_wait(watch.agreement.ledger, operation)
        watch._waits.append(self._entry)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        operation = self._entry[0]
        try:
            if isinstance(error, RuntimeError):
                raise self._watch.failed(operation, error) from error
            if error is not None:  # Ctrl-C: it waits no longer
                self._process.end_wait(operation, self._before)
                with contextlib.suppress(RuntimeError):
                    self._process.say()
        finally:
            self._watch._waits.remove(self._entry)
            self._process.end_wait(operation, self._before)


def _live(watch: weakref.ref[GroupWatch]) -> None:
    while True:
        time.sleep(TICK_S)
        alive = watch()
        if alive is None:
            return
        alive.tick()
        del alive
