"""Looks after collectives that do not end: finds out why from what the ranks said, ends them, and names who is gone."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from zerokern.comm.agreement import Board, Disagreement, Failure, ranks_in_words
from zerokern.comm.whereabouts import Waiting
from zerokern.core.errors import CommError

__all__ = ["Watch"]

TICK_S = 0.25
STUCK_S = 0.5
POLL_S = 2.0
LONGEST_S = 4.0  # between two looks at the store
QUIET_S = 5.0  # without a collective
ANSWER_S = 1.0  # what a rank that is still there has for saying that it has failed too
STORE_S = 10.0  # what the store has, all in all
ADORNMENT = re.compile(r"^\[[^\]]*\] ?|\. This is typically.*$", re.DOTALL)


class Watch:
    """What is waited for, and a thread that wakes now and then to see whether it has been for long.

    The thread talks to the store only then; it is there because gloo's wait cannot be interrupted, only ended.
    """

    def __init__(
        self, board: Board, sever: Callable[[], None], closed: Callable[[], list[int]], *, polls: bool = False
    ) -> None:
        self.board = board
        self.failure: Failure | None = None
        self._sever, self._closed, self._polls = sever, closed, polls
        self._waits: list[tuple[Waiting, float]] = []
        self._last: Waiting | None = None
        self._thread: threading.Thread | None = None
        self._next_look, self._pause = 0.0, STUCK_S
        self._explaining = False
        self._begun, self._quiet_since = -1, 0.0
        self._tied: weakref.WeakSet[Watch] = weakref.WeakSet()

    def tie(self, other: Watch) -> None:
        """Whoever waits for this rank in one of the two groups waits in vain once the other has failed."""
        self._tied.add(other)
        other._tied.add(self)

    def _end(self) -> None:
        """Nothing more comes in this group, nor in those that are tied to it."""
        self._sever()
        if self.failure is None:
            return
        reason = f"among other ranks that share its model, {self.failure.reason}"
        for other in [one for one in list(self._tied) if one.failure is None]:
            telling = threading.Thread(target=other.give_up, args=(reason,), daemon=True)
            telling.start()
            telling.join(STORE_S)

    @contextlib.contextmanager
    def over(self, waiting: Waiting) -> Iterator[None]:
        """Around a wait: what the transport raises becomes an error that names the operation and the ranks."""
        self.refuse_after_failure(waiting)
        if self._thread is None:
            self._start()
        entry = (waiting, time.monotonic())
        presence = self.board.presence
        before = presence.enter(self.board.ledger, waiting)
        self._waits.append(entry)
        try:
            yield
        except RuntimeError as error:
            raise self.explain(waiting, error) from error
        except BaseException:  # Ctrl-C: it waits no longer
            presence.leave(waiting, before)
            with contextlib.suppress(RuntimeError):
                presence.say()
            raise
        finally:
            self._waits.remove(entry)
            presence.leave(waiting, before)

    def launched(self, waiting: Waiting) -> None:
        """On a device nobody is seen to wait: the last launch stands for that, and the store is asked now and then."""
        self._last = waiting
        if self._thread is None:
            self._start()

    def give_up(self, reason: str) -> None:
        """This rank cannot go on: the others are told why, wherever they wait, and the group is at its end."""
        if self.failure is None:
            self.failure = Failure(f"rank {self.board.rank}: {reason}")
            with contextlib.suppress(RuntimeError):
                self.board.fail(self.failure)
            self._end()

    def refuse_after_failure(self, waiting: Waiting) -> None:
        """A group that has failed once stays so: its ranks no longer agree on what comes next."""
        if self.failure is not None:
            raise self._error(waiting, "was not begun, for this group has failed before", self.failure)

    def agree(self, key: str) -> None:
        """Board.agree; where it cannot, the group ends."""
        waiting = Waiting("agree", self.board.position, repr(key))
        self.refuse_after_failure(waiting)
        try:
            self.board.agree(key, self._interrupted)
        except Disagreement as error:
            self.failure = self.failure or self._cause(waiting, error.failure)
            raise self.explain(waiting, error) from None
        except RuntimeError as error:
            raise self.explain(waiting, error) from error

    def explain(self, waiting: Waiting, error: RuntimeError) -> CommError:
        """Why a transfer ended, and who is gone. Ends all other transfers as well, here and elsewhere."""
        self._explaining = True
        self.board.presence.ended.update(self.board.ledger.pages)
        said = ADORNMENT.sub("", str(error)) or type(error).__name__
        answers: list[Failure] = []
        # a store on a machine that has stopped does not answer, and has no limit of its own
        asking = threading.Thread(target=lambda: answers.append(self._ask(waiting, said)), daemon=True)
        asking.start()
        asking.join(STORE_S)
        if self.failure is None:
            silent = Failure(f"rank {self.board.rank} in {waiting}: {said}; the group's store does not answer either")
            self.failure = answers[0] if answers else silent
        self._end()
        return self._error(waiting, "did not end", self.failure)

    def unlike(self, waiting: Waiting) -> CommError:
        """What arrived belongs to another request: all ranks see that, so all of them say what theirs is."""
        limit = time.monotonic() + ANSWER_S
        with contextlib.suppress(RuntimeError):
            while self.failure is None and time.monotonic() < limit:
                self.failure = self.board.look(waiting)
                time.sleep(0.05)
        return self.explain(waiting, RuntimeError("ranks asked for different things at the same time"))

    def _error(self, waiting: Waiting, what: str, failure: Failure) -> CommError:
        ranks = tuple(range(self.board.size))
        message = f"{waiting} of {ranks_in_words(ranks)} {what}: {failure.reason}"
        return CommError(message, operation=waiting.kind, ranks=ranks, gone=failure.gone)

    def _ask(self, waiting: Waiting, said: str) -> Failure:
        """The reason, told to all others as well."""
        closed: list[int] = []
        try:
            self.board.presence.say()
            if self.failure is not None:
                self.board.fail(self.failure)
                return self.failure
            closed = self._closed()
            failure = self._inquire(waiting, said, closed)
            self.board.fail(failure)
            return failure
        except RuntimeError:
            # whoever served the store has most likely closed its connection with this rank first
            return Failure(
                f"{ranks_in_words(closed)} closed the connection, and the store is gone that the ranks talk through: "
                f"with the rank that served it, as a rule rank 0; {said}",
                tuple(closed),
            )

    def _inquire(self, waiting: Waiting, said: str, closed: list[int]) -> Failure:
        """Gone are those that closed their connection and do not say that they failed."""
        board = self.board
        told = board.presence.told(board.ledger, waiting)
        if told is not None:
            return Failure(told)
        limit = time.monotonic() + ANSWER_S
        while set(closed) - board.failing() and time.monotonic() < limit:
            time.sleep(0.05)
        failing = board.failing()
        gone = tuple(rank for rank in closed if rank not in failing)
        if gone:
            are = "is" if len(gone) == 1 else "are"
            return Failure(f"{ranks_in_words(gone)} {are} gone ({said}). Start again from a checkpoint", gone)
        failed = board.failed()
        if failed:
            return min(failed.items(), key=lambda item: (not item[1].gone, item[0]))[1]
        late = board.late(waiting)
        if not late:
            return Failure(f"rank {board.rank} failed in {waiting}: {said}")
        elsewhere = "; ".join(f"rank {rank} was last in {where}" for rank, where in late.items() if where)
        return Failure(
            f"{ranks_in_words(late)} did not take part in {waiting} in time ({said})"
            + (f"; {elsewhere}" if elsewhere else "")
        )

    def _cause(self, waiting: Waiting, failure: Failure) -> Failure:
        """That ranks differ, unless one of them is gone: then that is what the others must hear of."""
        closed = [] if failure.told else self._closed()
        return self._inquire(waiting, "its connection is closed", closed) if closed else failure

    def _interrupted(self) -> str | None:
        closed = self._closed()
        return f"{ranks_in_words(closed)} closed the connection" if closed else None

    def _start(self) -> None:
        self._thread = threading.Thread(target=_live, args=(weakref.ref(self),), name="zerokern watch", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """One look of the thread."""
        now = time.monotonic()
        if self._polls:
            stuck, self._pause = [(self._last, now)] if self._last is not None else [], POLL_S
        else:
            stuck = [(waiting, since) for waiting, since in list(self._waits) if now - since >= STUCK_S]
        if not stuck:
            self._next_look, self._pause = 0.0, STUCK_S
            self._rest(now)
            return
        if now < self._next_look or self.board.lost or self.failure is not None or self._explaining:
            return
        self._next_look, self._pause = now + self._pause, min(2 * self._pause, LONGEST_S)
        try:
            for waiting, since in stuck:
                failure = self.board.look(waiting) if not self._polls or self.board.troubled() else None
                if failure is not None:
                    failure = self._cause(waiting, failure)
                    self.board.fail(failure)  # before the connections close: whoever is closed and says nothing is gone
                    break
                self.board.warn(waiting, now - since)
        except RuntimeError:
            self.board.lost = True
            return
        if failure is not None and not self._explaining:
            self.failure = failure
            self._end()

    def _rest(self, now: float) -> None:
        """A process in which nobody has waited for long says once where it was: others may wait for it."""
        begun = sum(self.board.ledger.counts.values())
        if begun != self._begun:
            self._begun, self._quiet_since = begun, now
        elif now - self._quiet_since >= QUIET_S and not self.board.lost:
            self._quiet_since = math.inf
            try:
                self.board.presence.say()
            except RuntimeError:
                self.board.lost = True


def _live(watch: weakref.ref[Watch]) -> None:
    while True:
        time.sleep(TICK_S)
        one = watch()
        if one is None:
            return
        one.tick()
        del one
