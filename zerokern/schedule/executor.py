"""Runs programs: one worker thread does what is the CPU's and launches copies; the user's thread does what is the
device's.

Each lane is served in the order of its program. The worker takes the first op of any lane whose predecessors have
ended. An op without an action is somebody else's: on the device lane it is taken for done, elsewhere what comes after
it comes after what it comes after.

A failure ends every run that is under way, once what had been launched has ended, and is raised in the user's thread
with the traceback of where it happened. The next program then begins afresh.
"""

from __future__ import annotations

import atexit
import heapq
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from zerokern.core.errors import StateError, got
from zerokern.schedule.program import Op, Program
from zerokern.schedule.recorder import Recorder
from zerokern.schedule.worker import ENDED, LAUNCHED, PENDING, STARTED, Action, Fate, Work, Worker, over

__all__ = ["Action", "Executor", "Run"]

Key = tuple[str, str]
Reach = dict[Key, list[tuple[int, Key]]]  # what each op comes after: so many steps ago, this op
EXIT_S = 30.0  # that what is under way may take when the interpreter ends


class Executor:
    """One worker thread, started with the first program; it ends when that is closed or dropped, or with Python.

    >>> from zerokern.schedule.program import Op, Program, Ref
    >>> program = Program("example", (Op("Step", "a", "cpu"), Op("Publish", "a", "device", (Ref(0),))))
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

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._worker = Worker(recorder)
        self._performing = threading.RLock()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._steps = 0
        self._known: tuple[Program, frozenset[Key], frozenset[str], Reach] | None = None

    @property
    def recorder(self) -> Recorder | None:
        """Where ops are noted; may be set between steps."""
        return self._worker.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._worker.recorder = recorder

    @property
    def waited_ns(self) -> Mapping[str, int]:
        """For how long threads have waited for ops, by lane."""
        return self._worker.waited_ns

    def submit(self, program: Program, actions: Mapping[Key, Action], *, ahead: Iterable[str] = ()) -> Run:
        """Begins a program and returns at once; raises a failure that nobody has been told of.

        `ahead`: verbs of the device lane whose ops are those of the next step. They are handed over with what they wait
        for, `finish` leaves them to be performed, and if they have not been when the next program begins, never are.
        """
        self.check_process()
        worker = self._worker
        if worker.failure is not None and (worker.died or not worker.failure.told):
            worker.failure.tell()
        if worker.closing:
            raise StateError("this executor is closed; make another one")
        early = frozenset(ahead)
        reach = self._reach(program, actions, early)
        if self._thread is None:
            self._start()
        run = Run(self, program, self._steps + 1)
        with worker.changed:
            if worker.died and worker.failure is not None:
                worker.failure.tell()
            worker.failure = None
            worker.withdraw()
            for key in reach:
                index = program.index(*key)
                work = run.take(key, program.ops[index], index, actions[key], ahead=key[0] in early)
                for back, other in reach[key]:
                    work.after += self._found(back, other, run)
            self._steps += 1
            worker.live.append(run.fate)
            worker.recent.appendleft(run.mine)
            worker.inbox.append(list(run.mine.values()))
            worker.tell()
        return run

    def close(self) -> None:
        """Ends the worker after the op at hand; what has not begun never will. Raises a failure nobody was told of."""
        if self._process not in (0, os.getpid()):
            return
        self._worker.leave()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._worker.failure is not None and not self._worker.failure.told:
            self._worker.failure.tell()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_process(self) -> None:
        """Threads do not outlive a fork: in the child nothing would ever end."""
        if self._process not in (0, os.getpid()):
            raise StateError(
                f"this executor's worker is a thread of process {self._process}, and this is its fork {os.getpid()}, "
                "which has no such thread; build the optimizer after the fork"
            )

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._worker.serve, name="zerokern executor", daemon=True)
        self._thread.start()
        leaving = _Leaving(self._worker, self._thread, self._process)
        atexit.register(leaving.at_exit)
        weakref.finalize(self, leaving.dropped).atexit = False

    def _reach(self, program: Program, actions: Mapping[Key, Action], ahead: frozenset[str]) -> Reach:
        keys = frozenset(actions)
        if self._known is None or self._known[0] is not program or self._known[1:3] != (keys, ahead):
            for verb, what in keys:
                program.index(verb, what)
            self._known = (program, keys, ahead, _reach(program, keys, ahead))
        return self._known[3]

    def _found(self, back: int, key: Key, run: Run) -> Iterable[Work]:
        """The op of a run before. Where that was of another program without it, all that the worker had to do there."""
        if back == 0:
            return (run.mine[key],)
        recent = self._worker.recent
        if back > len(recent):
            return ()
        before = recent[back - 1]
        found = (before[key],) if key in before else (one for one in before.values() if one.op.lane != "device")
        return tuple(one for one in found if one.state != ENDED)


class Run:
    """One step under way. The thread that performs its device ops is the one that waits for the others.

    >>> Run.done.__doc__
    'Whether everything has ended, well or not; `finish` says which.'
    """

    def __init__(self, executor: Executor, program: Program, step: int) -> None:
        self.program = program
        self.fate = Fate(step, program.name, self)
        self.mine: dict[Key, Work] = {}
        self._executor = executor
        self._worker = executor._worker
        self._to_perform: dict[Key, Action] = {}

    def take(self, key: Key, op: Op, index: int, action: Action, *, ahead: bool) -> Work:
        """One more op of it."""
        if op.lane == "device":
            self._to_perform[key] = action
        work = self.mine[key] = Work(op, index, self.fate, None if op.lane == "device" else action, ahead=ahead)
        return work

    def left(self) -> list[Key]:
        """What is yet to be performed in this step."""
        return [key for key in self._to_perform if not self.mine[key].waits]

    @property
    def failure(self) -> BaseException | None:
        """What ended it before its time."""
        return None if self.fate.failed is None else self.fate.failed.error

    def done(self) -> bool:
        """Whether everything has ended, well or not; `finish` says which."""
        return self._ended() or all(
            work.state == ENDED or (work.state == LAUNCHED and over(work.ticket)) or work.waits
            for work in self.mine.values()
        )

    def wait(self, verb: str, what: str) -> None:
        """Waits until this op has ended; raises what failed."""
        work = self._work(verb, what)
        if work is None or work.state == ENDED:
            return
        self._check()
        if work.op.lane == "device" and work.state == PENDING:
            raise StateError(f"{work} was waited for, and this thread has yet to perform it")
        self._until_launched(work)
        self._settle(work)

    def perform(self, verb: str, what: str) -> None:
        """Does an op of the device lane in this thread, unless it is done. What it comes after has then ended on the
        CPU, or is in front of it on the device."""
        work = self._work(verb, what)
        if work is None or work.state >= LAUNCHED:
            return
        if work.op.lane != "device":
            advice = f"{work} is of lane {work.op.lane!r}: wait for it"
            raise ValueError(got("verb", verb, "an op of lane 'device'", advice))
        self._check()
        with self._executor._performing:
            if work.state >= LAUNCHED:
                return
            if work.state == STARTED:
                raise StateError(f"{work} is being performed: its action asked for it again")
            for one in work.after:
                run = one.fate.run()
                if one.op.lane != "device":
                    self._bring_before(one)
                elif run is not None:
                    run.perform(one.op.verb, one.op.what)
            work.action = self._to_perform.pop((verb, what))
            self._attempt(work, self._worker.do)

    def gate(self, verb: str, what: str) -> None:
        """What this thread gives to the device from now on comes after this op: so is memory that it reads kept."""
        work = self._work(verb, what)
        if work is not None and work.state != ENDED:
            self._check()
            self._bring_before(work)

    def finish(self) -> None:
        """Performs what is left to perform, in order, and waits until everything has ended; raises what failed.

        But for what was handed over ahead: that is performed with the next step.
        """
        if not self._ended():
            before = [fate.run() for fate in list(self._worker.live) if fate.step < self.fate.step]
            for run in [one for one in before if one is not None] + [self]:
                for verb, what in run.left():
                    run.perform(verb, what)
            for (verb, what), work in self.mine.items():
                if not work.waits:
                    self.wait(verb, what)
        if self.fate.failed is not None:
            self.fate.failed.tell()

    def _ended(self) -> bool:
        return self.fate.failed is not None or self.fate.left == 0

    def _work(self, verb: str, what: str) -> Work | None:
        work = self.mine.get((verb, what))
        if work is None:
            self.program.index(verb, what)
            self._check()
        return work

    def _check(self) -> None:
        """What does not end in this process, or at all, is not waited for."""
        if self.fate.failed is not None:
            self.fate.failed.tell()
        if self.fate.left:
            self._executor.check_process()

    def _until_launched(self, work: Work) -> None:
        worker = self._worker
        while work.state < LAUNCHED:
            self._check()
            with worker.changed:
                if work.state >= LAUNCHED or self.fate.failed is not None:
                    continue
                if worker.stuck() and self._nobody_performs():
                    self._refuse_to_hang(work)
                began = time.perf_counter_ns()
                worker.changed.wait()
                worker.waited_ns[work.op.lane] += time.perf_counter_ns() - began

    def _nobody_performs(self) -> bool:
        """Nobody but this thread, that is."""
        performing = self._executor._performing
        if performing.acquire(blocking=False):
            performing.release()
            return True
        return False

    def _refuse_to_hang(self, work: Work) -> None:
        before = [one for head in self._worker.heads() for one in head.after if one.op.lane == "device"]
        held_up_by = next((one for one in before if one.state == PENDING), None)
        raise StateError(
            f"{work} was waited for, and the worker cannot go on before this thread performs "
            f"{held_up_by or 'its ops of lane device'}"
        )

    def _bring_before(self, one: Work) -> None:
        """What this thread gives to the device from now on comes after the op."""
        self._until_launched(one)
        ticket = one.ticket
        if ticket is None:
            return
        if one.op.lane == "cpu" or not hasattr(ticket, "gate") or over(ticket):
            self._settle(one)
        else:
            ticket.gate()

    def _settle(self, work: Work) -> None:
        if work.state != ENDED:
            self._attempt(work, self._worker.settle)

    def _attempt(self, work: Work, what: Callable[[Work], None]) -> None:
        """A failure in this thread ends the run as one on the worker does: the worker sees to it."""
        try:
            what(work)
        except BaseException as error:
            if work.state == LAUNCHED and not isinstance(error, Exception):
                raise  # Ctrl-C while waiting: what is waited for goes on
            worker = self._worker
            worker.inbox.append((error, work))
            worker.tell()
            with worker.changed:
                while self.fate.failed is None and not worker.over:
                    worker.changed.wait()
            if self.fate.failed is not None:
                self.fate.failed.told = True
            raise

    def __str__(self) -> str:
        return str(self.fate)


class _Leaving:
    """Ends the worker when nobody is left to give it work: it holds neither the executor nor a way back to it."""

    def __init__(self, worker: Worker, thread: threading.Thread, process: int) -> None:
        self._worker, self._thread, self._process = worker, thread, process

    def dropped(self) -> None:
        """The garbage collector calls it in any thread, whatever that holds: nobody waits."""
        atexit.unregister(self.at_exit)
        if self._process == os.getpid():
            self._worker.leave()

    def at_exit(self) -> None:
        if self._process == os.getpid():
            self._worker.leave()
            self._thread.join(EXIT_S)


def _reach(program: Program, keys: frozenset[Key], ahead: frozenset[str]) -> Reach:
    """What each op with an action comes after, and in which run before its own, through ops without an action; the
    latest of each suffices, for lanes keep their order over steps. What is handed over `ahead` comes last."""
    reach: Reach = {}
    for index in sorted(range(len(program.ops)), key=lambda index: program.ops[index].verb in ahead):
        op = program.ops[index]
        if (op.verb, op.what) not in keys:
            continue
        if op.verb in ahead and op.lane != "device":
            raise ValueError(got("ahead", op.verb, "verbs of the device lane", "Others are begun as soon as they can"))
        todo = [(ref.back, ref.index) for ref in program.ops[index].after]
        heapq.heapify(todo)
        seen: set[int] = set()
        found = reach[op.verb, op.what] = []
        while todo:
            back, other = heapq.heappop(todo)
            if other in seen:
                continue
            seen.add(other)
            before = program.ops[other]
            if (before.verb, before.what) in keys:
                runs = back + (before.verb in ahead) - (op.verb in ahead)
                if runs < 0:
                    says = "is handed over a step before what it comes after"
                    raise ValueError(f"{op.verb} {op.what} {says}, {before.verb} {before.what}")
                found.append((runs, (before.verb, before.what)))
            elif before.lane != "device":
                for ref in before.after:
                    heapq.heappush(todo, (back + ref.back, ref.index))
    return reach
