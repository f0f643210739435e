"""The executor's thread. Only it takes ops from the lanes, and only it ends runs that have failed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from zerokern.core import native
from zerokern.core.errors import StateError, got
from zerokern.memory.staging import Ticket
from zerokern.schedule.program import LANES, Key, Op
from zerokern.schedule.ranges import named
from zerokern.schedule.recorder import Recorder

__all__ = ["ENDED", "LAUNCHED", "PENDING", "STARTED", "Action", "OpFailure", "RunState", "Task", "Worker"]

Action = Callable[[], "Ticket | None"]
PENDING, STARTED, LAUNCHED, ENDED = range(4)
BRIEFLY_S = 200e-6


class Performer(Protocol):
    """A run as the worker sees it: it performs device ops."""

    def perform(self, verb: str, what: str) -> None: ...

    def perform_rest(self) -> None: ...


class OpFailure:
    """An error of an op, with the traceback of where it was raised.

    >>> OpFailure(ValueError("no")).reported
    False
    """

    def __init__(self, error: BaseException, op: str = "") -> None:
        self.error = error
        self.reported = False
        if op:
            with contextlib.suppress(Exception):
                notes = [*getattr(error, "__notes__", ()), f"in {op}, as the executor ran it"]
                vars(error)["__notes__"] = notes
        self._traceback = error.__traceback__

    def reraise(self) -> None:
        """Raises the same exception with its first traceback, however often it is raised."""
        self.reported = True
        raise self.error.with_traceback(self._traceback)


class RunState:
    """The worker's view of a run. It does not keep the run alive, whose actions refer to the executor's owner."""

    def __init__(self, step: int, name: str, run: Performer) -> None:
        self.step, self.name = step, name
        self.run: Callable[[], Performer | None] = weakref.ref(run)
        self.left = 0  # ops that have not ended
        self.to_perform = 0  # of them, those that a user's thread has yet to begin
        self.ahead = 0  # of these, those that it begins with the next step
        self.failed: OpFailure | None = None
        self.threads = torch.get_num_threads()  # of torch, in the thread that begins the run

    def is_over(self) -> bool:
        """Returns whether nothing of the run will happen any more."""
        lost = self.left == self.to_perform and self.run() is None
        return self.failed is not None or self.left == self.ahead or lost

    def __str__(self) -> str:
        return f"step {self.step} ({self.name})"


class Task:
    """One op of one run: its ticket until that has ended, and its action, which the run keeps for device ops.

    It counts its dependencies, so that the end of an op costs time proportional to its followers only.
    """

    __slots__ = (
        *("action", "after", "ahead", "entry", "followers", "is_awaited", "op", "rank", "run_state", "state"),
        *("ticket", "unended", "unlaunched"),
    )

    def __init__(self, op: Op, index: int, run_state: RunState, action: Action | None, *, ahead: bool) -> None:
        self.op, self.run_state, self.action, self.ahead = op, run_state, action, ahead
        self.rank = (
            op.lane == "cpu",
            run_state.step,
            index,
        )  # launches first: they take no time and run asynchronously
        self.after: list[Task] = []
        self.followers: list[Task] = []
        self.unended = self.unlaunched = 0  # of those that it comes after
        self.state = PENDING
        self.is_awaited = False  # a thread sleeps until it is launched
        self.ticket: Any = None
        self.entry: Any = None
        run_state.left += 1
        run_state.to_perform += op.lane == "device"
        run_state.ahead += ahead

    def depend_on(self, other: Task) -> None:
        """Adds a dependency. Called with the worker's lock held."""
        if other.state != ENDED:
            self.after.append(other)
            other.followers.append(self)
            self.unended += 1
            self.unlaunched += other.state < LAUNCHED

    def advance(self, state: int) -> None:
        """Sets the state to launched or ended. Called with the worker's lock held."""
        was, self.state = self.state, state
        for follower in self.followers:
            follower.unlaunched -= was < LAUNCHED
            follower.unended -= state == ENDED
        if state == ENDED and was != ENDED:
            self.run_state.left -= 1
            self.ticket, self.followers = None, []

    @property
    def is_deferred(self) -> bool:
        """Whether the task is left for the next step."""
        return self.ahead and self.state == PENDING

    def __str__(self) -> str:
        return f"{self.op.verb} {self.op.what} of {self.run_state}"


class Worker:
    """What the worker thread and users' threads share. Runs and the thread refer to it; it does not refer to the
    executor."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.lock = threading.RLock()
        self.users_condition = threading.Condition(self.lock)
        self.worker_condition = threading.Condition(self.lock)
        self.errors: deque[tuple[BaseException, Task]] = deque()  # of users' threads
        self.live: list[RunState] = []  # not known to be over
        self.recent: deque[dict[Key, Task]] = deque(maxlen=8)  # how far a Ref may reach back
        self.failure: OpFailure | None = None
        self.closing = self.over = self.died = False
        self.waited_ns: Counter[str] = Counter()  # by the lane of what was waited for, by all threads
        self._lanes: dict[str, deque[Task]] = {lane: deque() for lane in LANES if lane != "device"}
        self._launched: dict[str, deque[Task]] = {lane: deque() for lane in LANES}
        self._changes, self._asleep_at = 0, -1

    def begin(self, state: RunState, tasks: dict[Key, Task]) -> None:
        """Adds the tasks of a new run. Called with the lock held."""
        self.live = [run for run in self.live if not run.is_over()]
        self.live.append(state)
        self.recent.appendleft(tasks)
        for task in tasks.values():
            if task.op.lane != "device":
                self._lanes[task.op.lane].append(task)
        self.notify()

    def notify(self) -> None:
        """Wakes sleeping threads after a change."""
        with self.lock:
            self._changes += 1
            self.worker_condition.notify_all()
            self.users_condition.notify_all()

    def drop_deferred(self) -> None:
        """Ends the tasks that the last run left for this step and nobody performed. Called with the lock held."""
        for task in self.recent[0].values() if self.recent else ():
            if task.is_deferred:
                task.run_state.to_perform -= 1
                task.run_state.ahead -= 1
                task.advance(ENDED)

    def stop(self) -> None:
        """Tells the thread to end, without waiting: the garbage collector calls this in any thread, with any locks
        held."""
        self.closing = True
        self.notify()

    def is_stuck(self) -> bool:
        """Returns whether the thread can do nothing before something changes. Called with the lock held."""
        return self._asleep_at == self._changes and not self.errors

    def next_tasks(self) -> list[Task]:
        """Returns the next task of each lane, in the order in which they may begin."""
        return sorted((lane[0] for lane in list(self._lanes.values()) if lane), key=lambda task: task.rank)

    def serve(self) -> None:
        """Runs the thread, which computes with the native pool and so keeps to the pool's CPUs.

        An error outside of any op fails all runs, because nobody else would ever end them.
        """
        try:
            cpus = native.cpus()
            if cpus:
                with contextlib.suppress(OSError):  # CPUs that the launcher has taken away since
                    os.sched_setaffinity(0, cpus)
            while not self.closing:
                seen = self._changes
                while self.errors:
                    self.fail(*self.errors.popleft())
                task, waited_for = self._next()
                if task is not None:
                    self._lanes[task.op.lane].popleft()
                    # torch counts threads by thread. A new one has the machine's number in MKL, whatever the program
                    # has set, and products of matrices have other last bits with another number.
                    if torch.get_num_threads() != task.run_state.threads:
                        torch.set_num_threads(task.run_state.threads)
                    self._attempt(task, self.do)
                elif self._note_ends(waited_for):
                    continue
                elif len(waited_for) == 1:
                    self._attempt(waited_for[0], self.wait_for)
                elif waited_for:
                    self._sleep_briefly(seen)
                else:
                    self._sleep(seen)
            self._end()
        except BaseException as error:
            self._end(error)

    def do(self, task: Task) -> None:
        """Runs a task's action and keeps its ticket."""
        action, task.action, task.after = task.action, None, []
        task.state = STARTED
        if task.op.lane == "device":
            task.run_state.to_perform -= 1
            task.run_state.ahead -= task.ahead
        state = task.run_state
        task.ticket, task.entry = started(task.op, action, state.step + task.ahead, state.name, self.recorder)
        if task.ticket is None:
            self._advance(task, ENDED)
            return
        self._launched[task.op.lane].append(task)
        self._advance(task, LAUNCHED)

    def wait_for(self, task: Task) -> None:
        """Waits for the ticket of a launched task, in any thread."""
        ticket = task.ticket
        if ticket is None:
            return
        began = time.perf_counter_ns()
        ticket.wait()
        with self.lock:
            self.waited_ns[task.op.lane] += time.perf_counter_ns() - began
            entry, task.entry = task.entry, None
        if entry is not None and self.recorder is not None:
            self.recorder.ended(entry, ticket)
        self._advance(task, ENDED)

    def _advance(self, task: Task, state: int) -> None:
        """Advances a task. Wakes users' threads only if needed: they would take the GIL from the worker at each op."""
        with self.lock:
            if task.state >= state:
                return
            task.advance(state)
            self._changes += 1
            self.worker_condition.notify_all()
            if task.is_awaited:
                self.users_condition.notify_all()

    def _next(self) -> tuple[Task | None, list[Task]]:
        """Returns a task that may begin; or else the launched tasks whose ends the lanes wait for."""
        waited_for: list[Task] = []
        for head in self.next_tasks():
            if not head.unended:
                return head, []
            if not head.unlaunched:
                after = head.after
                while after and after[-1].state == ENDED:
                    after.pop()
                if not after:
                    return head, []
                if after[-1] not in waited_for:
                    waited_for.append(after[-1])
        return None, waited_for

    def _note_ends(self, waited_for: Iterable[Task]) -> bool:
        """Ends tasks whose tickets have ended: those that are waited for, and the first ones of each lane."""
        ended = [task for task in waited_for if task.state == ENDED or has_ended(task.ticket)]
        for lane in self._launched.values():
            while lane and (lane[0].state == ENDED or has_ended(lane[0].ticket)):
                ended.append(lane.popleft())
        for task in ended:
            if task.state != ENDED:
                self._attempt(task, self.wait_for)
        return bool(ended)

    def _sleep_briefly(self, seen: int) -> None:
        """Sleeps a moment while two lanes wait for two tickets, either of which may end first."""
        with self.lock:
            if self._changes == seen and not self.closing:
                self.worker_condition.wait(BRIEFLY_S)

    def _sleep(self, seen: int) -> None:
        with self.lock:
            self.live = [state for state in self.live if not state.is_over()]
            if self._changes != seen or self.closing:
                return
            self._asleep_at = seen
            self.users_condition.notify_all()
            while self._changes == seen and not self.closing:
                self.worker_condition.wait()

    def _attempt(self, task: Task, what: Callable[[Task], None]) -> None:
        try:
            what(task)
        except BaseException as error:
            self.fail(error, task)

    def fail(self, error: BaseException, task: Task) -> None:
        """Ends every run after the launched ops have ended: they would write to memory that others believe to be
        free."""
        if task.run_state.failed is not None:  # two threads waited for one ticket
            return
        self._drain()
        with self.lock:
            ended, self.live = [*self.live, task.run_state], []
            self.recent.clear()
            for lane in self._lanes.values():
                lane.clear()
            self.failure = OpFailure(error, str(task))
            for state in ended:
                state.failed = self.failure
            self.notify()

    def _drain(self) -> None:
        for lane in self._launched.values():
            while lane:
                task = lane.popleft()
                with contextlib.suppress(BaseException):  # the first failure is the one that is told
                    self.wait_for(task)

    def _end(self, error: BaseException | None = None) -> None:
        """Ends the thread, because of `error` or closed: what has not ended never will."""
        self._drain()
        with self.lock:
            self.closing = self.over = True
            if error is not None:
                self.died, self.failure = True, OpFailure(error)
            for state in self.live:
                if error is not None or state.left > state.ahead:
                    closed = StateError(f"{state} had not ended when its executor closed")
                    state.failed = state.failed or (OpFailure(closed) if error is None else self.failure)
            self.live = []
            self.notify()


def started(op: Op, action: Action | None, step: int, program: str, recorder: Recorder | None) -> tuple[Any, Any]:
    """Runs the action of an op. Returns its ticket, if any, and the recorder's entry for it."""
    begin = 0 if recorder is None else time.perf_counter_ns()
    with named(op.verb, op.what):
        ticket = None if action is None else action()
    if ticket is None:
        if recorder is not None:
            recorder.note(step, op.lane, op.verb, op.what, begin, time.perf_counter_ns(), op.nbytes, op.turn)
        return None, None
    if not hasattr(ticket, "wait"):
        what = f"the result of {op.verb} {op.what} of step {step} ({program})"
        raise TypeError(got(what, ticket, "None, or a ticket with wait() and done()"))
    if recorder is None:
        return ticket, None
    return ticket, recorder.launched(step, op.lane, op.verb, op.what, begin, op.nbytes, op.turn)


def has_ended(ticket: Any) -> bool:
    """Returns whether a ticket has ended, successfully or not."""
    return ticket is None or bool(ticket.done())
