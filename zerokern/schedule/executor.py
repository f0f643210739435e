"""Runs step programs: in the caller's thread, or with one worker thread beside it.

The worker thread runs ops of the CPU and launches copies; the user's thread runs ops of the device. Each lane keeps the
order of its program, and an op begins when all its dependencies have ended. An op without an action belongs to somebody
else: on the device lane it counts as done, elsewhere its followers wait for its dependencies.

A failure ends every run, after launched ops have ended. It is raised in the user's thread, with its original traceback.
The next program starts afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from zerokern.core.errors import StateError, got
from zerokern.memory.interrupts import whole
from zerokern.schedule.program import Key, Op, Reach, StepProgram
from zerokern.schedule.recorder import Recorder
from zerokern.schedule.worker import (
    ENDED,
    LAUNCHED,
    PENDING,
    STARTED,
    Action,
    OpFailure,
    RunState,
    Task,
    Worker,
    has_ended,
    started,
)

__all__ = ["Action", "Executor", "InlineRun", "Run"]

EXIT_S = 30.0  # that what is under way may take when the interpreter ends


class Executor:
    """Runs one program after another. `inline`: in the thread that waits for them, in the order of the program.

    Otherwise a worker thread starts with the first program. It ends when the executor is closed or dropped, or when
    Python exits.

    >>> from zerokern.schedule.program import Op, StepProgram, Ref
    >>> program = StepProgram("example", (Op("Step", "a", "cpu"), Op("Publish", "a", "device", (Ref(0),))))
    >>> with Executor() as executor:
    ...     run = executor.submit(program, {
    ...         ("Step", "a"): lambda: print("on the worker"),
    ...         ("Publish", "a"): lambda: print("here"),
    ...     })
    ...     run.perform("Publish", "a")
    ...     run.finish()
    on the worker
    here
    """

    def __init__(self, recorder: Recorder | None = None, *, inline: bool = False) -> None:
        self._worker = Worker(recorder)
        self.inline = inline
        self._performing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._steps = 0
        self._known: tuple[StepProgram, frozenset[Key], frozenset[str], Reach] | None = None

    @property
    def recorder(self) -> Recorder | None:
        """Where ops are noted; may be set between steps."""
        return self._worker.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._worker.recorder = recorder

    @property
    def waited_ns(self) -> Mapping[str, int]:
        """Nanoseconds that threads have waited for ops, by lane."""
        return self._worker.waited_ns

    def submit(
        self, program: StepProgram, actions: Mapping[Key, Action], *, ahead: Iterable[str] = ()
    ) -> Run | InlineRun:
        """Starts a program and returns at once; raises an earlier failure that was not reported.

        `ahead`: verbs of the device lane whose ops belong to the next step. They are submitted with their dependencies,
        and `finish` leaves them. Ops that were not performed when the next program begins never run.
        """
        self.check_process()
        worker = self._worker
        if worker.failure is not None and (worker.died or not worker.failure.reported):
            worker.failure.reraise()
        if worker.closing:
            raise StateError("this executor is closed; make another one")
        if worker.recorder is not None:
            worker.recorder.submitted(self._steps + 1)
        early = frozenset(ahead)
        reach = self._reach_of(program, actions, early)
        if self.inline:
            self._steps += 1
            return InlineRun(program, self._steps, reach, actions, worker)
        if self._thread is None:
            self._start()
        run = Run(self, program, self._steps + 1)
        with worker.lock:
            if worker.died and worker.failure is not None:
                worker.failure.reraise()
            worker.failure = None
            worker.drop_deferred()
            for key, before in reach.items():
                index = program.index(*key)
                task = run._add(key, program.ops[index], index, actions[key], ahead=key[0] in early)
                for back, other in before:
                    for earlier in self._tasks_of(back, other, run):
                        task.depend_on(earlier)
            self._steps += 1
            worker.begin(run._state, run._tasks)
        return run

    def close(self) -> None:
        """Ends the worker after its current op; ops that have not begun never run. Raises a failure that was not
        reported."""
        if self._process not in (0, os.getpid()):
            return
        self._worker.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._worker.failure is not None and not self._worker.failure.reported:
            self._worker.failure.reraise()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_process(self) -> None:
        """Raises in a forked child: threads do not survive a fork, so nothing would ever end there."""
        if self._process not in (0, os.getpid()):
            raise StateError(
                f"this executor's worker is a thread of process {self._process}, and this is its fork {os.getpid()}, "
                "which has no such thread; build the optimizer after the fork"
            )

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._worker.serve, name="zerokern executor", daemon=True)
        self._thread.start()
        ending = _WorkerShutdown(self._worker, self._thread, self._process)
        atexit.register(ending.at_exit)
        weakref.finalize(self, ending.dropped).atexit = False

    def _reach_of(self, program: StepProgram, actions: Mapping[Key, Action], ahead: frozenset[str]) -> Reach:
        keys = frozenset(actions)
        if self._known is None or self._known[0] is not program or self._known[1:3] != (keys, ahead):
            self._known = (program, keys, ahead, program.reach(keys, ahead))
        return self._known[3]

    def _tasks_of(self, back: int, key: Key, run: Run) -> Iterable[Task]:
        """Returns the task of an op in an earlier run; if that ran another program without it, all its worker tasks."""
        if back == 0:
            return (run._tasks[key],)
        recent = self._worker.recent
        if back > len(recent):
            return ()
        before = recent[back - 1]
        return (before[key],) if key in before else [task for task in before.values() if task.op.lane != "device"]


class Run:
    """One step in progress. The thread that performs its device ops also waits for the others.

    >>> Run.done.__doc__
    'Returns whether everything has ended, well or not; `finish` says which.'
    """

    def __init__(self, executor: Executor, program: StepProgram, step: int) -> None:
        self.program = program
        self._state = RunState(step, program.name, self)
        self._tasks: dict[Key, Task] = {}
        self._executor = executor
        self._worker = executor._worker
        self._to_perform: dict[Key, Action] = {}

    def _add(self, key: Key, op: Op, index: int, action: Action, *, ahead: bool) -> Task:
        if op.lane == "device":
            self._to_perform[key] = action
        task = Task(op, index, self._state, None if op.lane == "device" else action, ahead=ahead)
        self._tasks[key] = task
        return task

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the run."""
        return None if self._state.failed is None else self._state.failed.error

    def done(self) -> bool:
        """Returns whether everything has ended, well or not; `finish` says which."""
        return self._over or all(
            task.state == ENDED or (task.state == LAUNCHED and has_ended(task.ticket)) or task.is_deferred
            for task in self._tasks.values()
        )

    def wait(self, verb: str, what: str) -> None:
        """Waits until this op has ended; raises what failed."""
        task = self._task(verb, what)
        if task is None or task.state == ENDED:
            return
        self._check()
        if task.op.lane == "device" and task.state == PENDING:
            raise StateError(f"{task} was waited for, and this thread has yet to perform it")
        self._wait_for_launch(task)
        self._wait_for_end(task)

    def perform(self, verb: str, what: str) -> None:
        """Performs an op of the device lane in this thread, unless it is done. Ops that it depends on have ended on the
        CPU, or are queued before it on the device."""
        task = self._task(verb, what)
        if task is None or task.state >= LAUNCHED:
            return
        if task.op.lane != "device":
            advice = f"{task} is of lane {task.op.lane!r}: wait for it"
            raise ValueError(got("verb", verb, "an op of lane 'device'", advice))
        self._check()
        with self._executor._performing:
            if task.state >= LAUNCHED:
                return
            if task.state == STARTED:
                raise StateError(f"{task} is being performed: its action asked for it again")
            for before in task.after:
                run = before.run_state.run()
                if before.op.lane != "device":
                    self._gate_on(before)
                elif run is not None:
                    run.perform(before.op.verb, before.op.what)
            with whole(task):  # half of it would end the step for good
                task.action = self._to_perform.pop((verb, what))
                self._attempt(task, self._worker.do)

    def perform_rest(self) -> None:
        """Performs the remaining device ops of this step, in order."""
        for verb, what in [key for key in self._to_perform if not self._tasks[key].is_deferred]:
            self.perform(verb, what)

    def gate(self, verb: str, what: str) -> None:
        """Makes later device work of this thread wait for this op, so that memory the op reads is not overwritten."""
        task = self._task(verb, what)
        if task is not None and task.state != ENDED:
            self._check()
            self._gate_on(task)

    def finish(self) -> None:
        """Performs the remaining device ops in order and waits until everything has ended; raises what failed.

        Ops submitted ahead are left for the next step.
        """
        if not self._over:
            states = [state for state in list(self._worker.live) if state.step < self._state.step]
            for run in [*(state.run() for state in states), self]:
                if run is not None:
                    run.perform_rest()
            for (verb, what), task in self._tasks.items():
                if not task.is_deferred:
                    self.wait(verb, what)
        if self._state.failed is not None:
            self._state.failed.reraise()

    @property
    def _over(self) -> bool:
        return self._state.failed is not None or self._state.left == 0

    def _task(self, verb: str, what: str) -> Task | None:
        task = self._tasks.get((verb, what))
        if task is None:
            self.program.index(verb, what)
            self._check()
        return task

    def _check(self) -> None:
        """Raises if waiting is useless: the run has failed, or the worker is not in this process."""
        if self._state.failed is not None:
            self._state.failed.reraise()
        if self._state.left:
            self._executor.check_process()

    def _wait_for_launch(self, task: Task) -> None:
        worker = self._worker
        while task.state < LAUNCHED:
            self._check()
            with worker.lock:
                if task.state >= LAUNCHED or self._state.failed is not None:
                    continue
                if worker.is_stuck() and self._nobody_performs():
                    self._refuse_to_hang(task)
                task.is_awaited = True
                began = time.perf_counter_ns()
                worker.users_condition.wait()
                worker.waited_ns[task.op.lane] += time.perf_counter_ns() - began

    def _nobody_performs(self) -> bool:
        """Returns whether no other thread performs an op."""
        performing = self._executor._performing
        if performing.acquire(blocking=False):
            performing.release()
            return True
        return False

    def _refuse_to_hang(self, task: Task) -> None:
        held_up = [
            (head, before) for head in self._worker.next_tasks() for before in head.after if before.op.lane == "device"
        ]
        head, by = next(((head, before) for head, before in held_up if before.state == PENDING), (task, None))
        if by is not None and by.run_state.run() is None:
            says = f"{head} comes after {by}, which nobody can perform any more: its run has been dropped"
            self._attempt(head, partial(_refuse, says))
        raise StateError(
            f"{task} was waited for, and the worker cannot go on before this thread performs "
            f"{by or 'its ops of lane device'}"
        )

    def _gate_on(self, task: Task) -> None:
        """Makes later device work of this thread wait for the task."""
        self._wait_for_launch(task)
        ticket = task.ticket
        if ticket is None:
            return
        if task.op.lane == "cpu" or not hasattr(ticket, "gate") or has_ended(ticket):
            self._wait_for_end(task)
        else:
            ticket.gate()

    def _wait_for_end(self, task: Task) -> None:
        if task.state != ENDED:
            self._attempt(task, self._worker.wait_for)

    def _attempt(self, task: Task, what: Callable[[Task], None]) -> None:
        """Runs `what`; a failure ends the run as a failure on the worker does, which handles it between two ops."""
        try:
            what(task)
        except BaseException as error:
            if task.state == LAUNCHED and not isinstance(error, Exception):
                raise  # Ctrl-C while waiting: what is waited for goes on
            worker = self._worker
            worker.errors.append((error, task))
            worker.notify()
            with worker.lock:
                while self._state.failed is None and not worker.over:
                    worker.users_condition.wait()
            if self._state.failed is not None:
                self._state.failed.reported = True
            raise

    def __str__(self) -> str:
        return str(self._state)


class InlineRun:
    """One step in the thread that waits for it. Ops begin in the order of the program; what they launch runs beside
    later ops until one depends on it.

    >>> InlineRun.finish.__doc__
    'Does what is left, and waits until everything has ended; raises what failed.'
    """

    def __init__(
        self, program: StepProgram, step: int, reach: Reach, actions: Mapping[Key, Action], worker: Worker
    ) -> None:
        self.program = program
        self._step, self._reach, self._actions, self._worker = step, reach, dict(actions), worker
        self.keys: Sequence[Key] = list(reach)  # of the ops that have actions, in the order of the program
        self._begun = 0
        self._launched: dict[Key, tuple[Op, Any, Any]] = {}
        self._failed: OpFailure | None = None

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the run."""
        return None if self._failed is None else self._failed.error

    def done(self) -> bool:
        """Returns whether everything has ended, well or not; `finish` says which."""
        return self._failed is not None or (self._begun == len(self.keys) and not self._launched)

    def wait(self, verb: str, what: str) -> None:
        """Runs all ops up to this one and waits until it has ended; raises what failed."""
        self.program.index(verb, what)
        while (verb, what) in self._actions and not self.done():
            self._begin_next()
        self._end((verb, what))

    def finish(self) -> None:
        """Does what is left, and waits until everything has ended; raises what failed."""
        while self._begun < len(self.keys):
            self._begin_next()
        while self._launched:
            self._end(next(iter(self._launched)))
        if self._failed is not None:
            self._failed.reraise()

    def _begin_next(self) -> None:
        if self._failed is not None:
            self._failed.reraise()
        key = self.keys[self._begun]
        op = self.program.ops[self.program.index(*key)]
        for back, before in self._reach[key]:  # what came in earlier steps has ended
            if back == 0 and before in self._launched:
                _, ticket, _ = self._launched[before]
                if op.lane == "device" and hasattr(ticket, "gate") and not has_ended(ticket):
                    ticket.gate()
                else:
                    self._end(before)
        try:
            ticket, entry = started(op, self._actions.pop(key), self._step, self.program.name, self._worker.recorder)
        except BaseException as error:
            self._fail(error, op)
            raise
        self._begun += 1
        if ticket is not None:
            self._launched[key] = op, ticket, entry

    def _end(self, key: Key) -> None:
        if key not in self._launched:
            return
        op, ticket, entry = self._launched[key]
        began = time.perf_counter_ns()
        try:
            ticket.wait()
        except Exception as error:  # after Ctrl-C what is waited for goes on
            self._fail(error, op)
            raise
        self._worker.waited_ns[op.lane] += time.perf_counter_ns() - began
        if entry is not None:
            self._worker.recorder.ended(entry, ticket)  # type: ignore[union-attr]
        del self._launched[key]

    def _fail(self, error: BaseException, op: Op) -> None:
        """Ends the run after the launched ops have ended: they would write to memory that others believe to be free."""
        self.keys, launched, self._launched = self.keys[: self._begun], self._launched, {}
        self._actions.clear()
        for _, ticket, _ in launched.values():
            with contextlib.suppress(BaseException):
                ticket.wait()
        self._failed = OpFailure(error, f"{op.verb} {op.what} of step {self._step} ({self.program.name})")


class _WorkerShutdown:
    """Stops the worker when its executor is dropped or Python exits; it holds no reference to the executor."""

    def __init__(self, worker: Worker, thread: threading.Thread, process: int) -> None:
        self._worker, self._thread, self._process = worker, thread, process

    def dropped(self) -> None:
        """Stops the worker without waiting: the garbage collector calls this in any thread, with any locks held."""
        atexit.unregister(self.at_exit)
        if self._process == os.getpid():
            self._worker.stop()

    def at_exit(self) -> None:
        if self._process == os.getpid():
            self._worker.stop()
            self._thread.join(EXIT_S)


def _refuse(says: str, task: Task) -> None:
    raise StateError(says)
