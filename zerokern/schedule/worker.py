"""The executor's thread: it alone takes ops from the lanes, and it alone ends what has failed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from zerokern.core import native
from zerokern.core.errors import StateError, got
from zerokern.memory.staging import Ticket
from zerokern.schedule.program import LANES, Op
from zerokern.schedule.recorder import Launched, Recorder

__all__ = ["ENDED", "LAUNCHED", "PENDING", "STARTED", "Action", "Fate", "Raised", "Work", "Worker", "over"]

Action = Callable[[], "Ticket | None"]
PENDING, STARTED, LAUNCHED, ENDED = range(4)
DOZE_S = 200e-6


class Performer(Protocol):
    """A run, as the worker knows it: who does its device ops, and which of them are left."""

    def left(self) -> list[tuple[str, str]]: ...

    def perform(self, verb: str, what: str) -> None: ...


class Raised:
    """What went wrong, with the traceback of where it did.

    >>> Raised(ValueError("no")).told
    False
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.told = False
        self._traceback: TracebackType | None = error.__traceback__

    def tell(self) -> None:
        """Raises it: the same object, with the traceback that it had, however often it is raised."""
        self.told = True
        raise self.error.with_traceback(self._traceback)


class Fate:
    """What the worker knows of a run. It does not keep it: actions lead back to whoever owns the executor.

    >>> print(Fate(7, "overlap", None))
    step 7 (overlap)
    """

    def __init__(self, step: int, name: str, run: Performer | None) -> None:
        self.step, self.name = step, name
        self.run: Callable[[], Performer | None] = (lambda: None) if run is None else weakref.ref(run)
        self.left = 0  # ops that have not ended
        self.to_perform = 0  # of them, those that a user's thread has yet to begin
        self.ahead = 0  # of these, those that it begins with the next step
        self.failed: Raised | None = None

    def over(self) -> bool:
        """Whether nothing of it will happen any more."""
        lost = self.left == self.to_perform and self.run() is None
        return self.failed is not None or self.left == self.ahead or lost

    def __str__(self) -> str:
        return f"step {self.step} ({self.name})"


class Work:
    """One op of one run: its ticket until that has ended; its action too, but for device ops, which the run keeps.

    >>> work = Work(Op("Step", "head", "cpu"), 0, Fate(3, "example", None))
    >>> print(work), work.state == PENDING
    Step head of step 3 (example)
    (None, True)
    """

    __slots__ = ("action", "after", "ahead", "entry", "fate", "op", "rank", "state", "ticket")

    def __init__(self, op: Op, index: int, fate: Fate, action: Action | None = None, *, ahead: bool = False) -> None:
        self.op, self.fate, self.action, self.ahead = op, fate, action, ahead
        self.rank = (op.lane == "cpu", fate.step, index)  # launches first: they cost nothing and run beside the rest
        self.after: list[Work] = []
        self.state = PENDING
        self.ticket: Any = None
        self.entry: Launched | None = None
        fate.left += 1
        fate.to_perform += op.lane == "device"
        fate.ahead += ahead

    @property
    def waits(self) -> bool:
        """Whether it is left for the next step."""
        return self.ahead and self.state == PENDING

    def __str__(self) -> str:
        return f"{self.op.verb} {self.op.what} of {self.fate}"


class Worker:
    """What the thread and the user's threads share. Runs hold it, and so does the thread; neither holds the executor.

    >>> worker = Worker(None)
    >>> worker.closing, worker.heads()
    (False, [])
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.changed = threading.Condition()
        self.inbox: deque[list[Work] | tuple[BaseException, Work]] = deque()
        self.live: list[Fate] = []  # not known to be over
        self.recent: deque[dict[tuple[str, str], Work]] = deque(maxlen=8)  # how far a Ref may reach back
        self.failure: Raised | None = None
        self.closing = self.over = self.died = False
        self.waited_ns: Counter[str] = Counter()  # by the lane of what was waited for, by all threads
        self._lanes: dict[str, deque[Work]] = {lane: deque() for lane in LANES if lane != "device"}
        self._launched: deque[Work] = deque()
        self._changes, self._parked_at = 0, -1

    def tell(self) -> None:
        """Something has changed: whoever sleeps looks again."""
        with self.changed:
            self._changes += 1
            self.changed.notify_all()

    def withdraw(self) -> None:
        """What the last run left for this step was not wanted. Called with the lock held."""
        for work in self.recent[0].values() if self.recent else ():
            if work.waits:
                work.state = ENDED
                work.fate.left -= 1
                work.fate.to_perform -= 1
                work.fate.ahead -= 1

    def leave(self) -> None:
        """Tells the thread to go. The garbage collector calls it in any thread, whatever that holds: nobody waits."""
        self.closing = True
        self.tell()

    def stuck(self) -> bool:
        """Whether the thread can do nothing before something changes. Asked with the lock held."""
        return self._parked_at == self._changes and not self.inbox

    def heads(self) -> list[Work]:
        """The next op of each lane, in the order in which they may begin."""
        return sorted((lane[0] for lane in list(self._lanes.values()) if lane), key=lambda work: work.rank)

    def serve(self) -> None:
        """The thread's life. What ends it outside of any op fails all runs: nobody else would ever end them."""
        try:
            self._serve()
        except BaseException as error:
            self._die(error)

    def _serve(self) -> None:
        """It computes with the native pool, so it keeps to the CPUs that this was given."""
        cpus = native.cpus()
        if cpus:
            with contextlib.suppress(OSError):  # CPUs that the launcher has taken away since
                os.sched_setaffinity(0, cpus)
        while not self.closing:
            seen = self._changes
            while self.inbox and not self.closing:
                self._accept(self.inbox.popleft())
            work, waited_for = self._next()
            if work is not None:
                self._lanes[work.op.lane].popleft()
                self._attempt(work, self.do)
            elif self._sweep():
                continue
            elif len(waited_for) == 1:
                self._attempt(waited_for.pop(), self.settle)
            elif waited_for:
                self._doze(seen)
            else:
                self._park(seen)
        self._close()

    def do(self, work: Work) -> None:
        """Runs an action and keeps its ticket."""
        action, work.action, work.after = work.action, None, []
        work.state = STARTED
        op, step, recorder = work.op, work.fate.step + work.ahead, self.recorder
        if op.lane == "device":
            work.fate.to_perform -= 1
            work.fate.ahead -= work.ahead
        begin = 0 if recorder is None else time.perf_counter_ns()
        ticket = None if action is None else action()
        if ticket is None:
            if recorder is not None:
                recorder.note(step, op.lane, op.verb, op.what, begin, time.perf_counter_ns(), op.nbytes)
            self._end(work)
            return
        if not hasattr(ticket, "wait"):
            raise TypeError(got(f"the result of {work}", ticket, "None, or a ticket with wait() and done()"))
        if recorder is not None:
            work.entry = recorder.launched(step, op.lane, op.verb, op.what, begin, op.nbytes)
        work.ticket = ticket
        self._launched.append(work)
        work.state = LAUNCHED
        self.tell()

    def settle(self, work: Work) -> None:
        """Waits for the ticket of an op that was launched; any thread may."""
        ticket = work.ticket
        if ticket is None:
            return
        began = time.perf_counter_ns()
        ticket.wait()
        with self.changed:
            self.waited_ns[work.op.lane] += time.perf_counter_ns() - began
            entry, work.entry = work.entry, None
        if entry is not None and self.recorder is not None:
            self.recorder.ended(entry, ticket)
        self._end(work)

    def _end(self, work: Work) -> None:
        with self.changed:
            if work.state != ENDED:
                work.fate.left -= 1
            work.state = ENDED
            work.ticket = None
            self.tell()

    def _next(self) -> tuple[Work | None, set[Work]]:
        """An op that may begin; or else launched ones, whose ends are all that a lane waits for."""
        waited_for: set[Work] = set()
        for head in self.heads():
            head.after = [one for one in head.after if one.state != ENDED]
            if not head.after:
                return head, set()
            lost = next((one for one in head.after if one.op.lane == "device" and one.state == PENDING), None)
            if lost is not None and lost.fate.run() is None:
                says = f"{head} comes after {lost}, which nobody can perform any more: its run has been dropped"
                self._fail(StateError(says), head)
                return None, set()
            if all(one.state == LAUNCHED for one in head.after):
                waited_for.add(head.after[0])
        return None, waited_for

    def _sweep(self) -> bool:
        """Settles what has ended meanwhile, in whatever lane."""
        ended = [work for work in list(self._launched) if work.state == ENDED or over(work.ticket)]
        for work in ended:
            with contextlib.suppress(ValueError):  # a failure has just emptied it
                self._launched.remove(work)
            if work.state != ENDED:
                self._attempt(work, self.settle)
        return bool(ended)

    def _doze(self, seen: int) -> None:
        """Two lanes wait for two tickets, of which either may be the first to end."""
        with self.changed:
            if self._changes == seen and not self.closing:
                self.changed.wait(DOZE_S)

    def _park(self, seen: int) -> None:
        with self.changed:
            self.live = [fate for fate in self.live if not fate.over()]
            if self._changes != seen or self.closing:
                return
            self._parked_at = seen
            self.changed.notify_all()
            while self._changes == seen and not self.closing:
                self.changed.wait()

    def _accept(self, request: list[Work] | tuple[BaseException, Work]) -> None:
        if isinstance(request, tuple):
            self._fail(*request)
            return
        for work in request:
            failed = next((one.fate.failed for one in work.after if one.fate.failed is not None), None)
            if failed is not None:  # it was submitted while what it comes after was failing
                self._fail(failed.error, work, failed)
                return
            if work.op.lane != "device":
                self._lanes[work.op.lane].append(work)

    def _attempt(self, work: Work, what: Callable[[Work], None]) -> None:
        try:
            what(work)
        except BaseException as error:
            self._fail(error, work)

    def _fail(self, error: BaseException, work: Work, cause: Raised | None = None) -> None:
        """Ends every run, after what was launched has ended: it would write to memory that others take to be free."""
        if work.fate.failed is not None:  # two threads waited for one ticket
            return
        self._drain()
        with self.changed:
            ended, self.live = [*self.live, work.fate], []
            self.recent.clear()
            for lane in self._lanes.values():
                lane.clear()
            if cause is None:
                with contextlib.suppress(Exception):
                    notes = [*getattr(error, "__notes__", ()), f"in {work}, as the executor ran it"]
                    vars(error)["__notes__"] = notes
                cause = self.failure = Raised(error)
            for fate in ended:
                fate.failed = cause
            self.tell()

    def _drain(self) -> None:
        while self._launched:
            work = self._launched.popleft()
            with contextlib.suppress(BaseException):  # the first failure is the one that is told
                self.settle(work)

    def _die(self, error: BaseException) -> None:
        self._drain()
        with self.changed:
            self.closing = self.over = self.died = True
            self.failure = Raised(error)
            for fate in self.live:
                fate.failed = fate.failed or self.failure
            self.live = []
            self.tell()

    def _close(self) -> None:
        self._drain()
        with self.changed:
            for fate in self.live:
                if fate.left > fate.ahead:
                    fate.failed = fate.failed or Raised(StateError(f"{fate} had not ended when its executor closed"))
            self.live = []
            self.over = True
            self.tell()


def over(ticket: Any) -> bool:
    """Whether a ticket has ended, well or not.

    >>> over(None)
    True
    """
    return ticket is None or bool(ticket.done())
