"""What fails on the worker is raised in the user's thread, with its own traceback, after what was under way has ended;
no end of the process hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
from forked import run_forked
from ticket_cases import HeldTicket, acting, program, until

from zerokern.core.errors import StateError
from zerokern.schedule.executor import Executor

STEPS = program("Fetch a down", "Step a cpu", "Step b cpu", "Publish a device 1", "Publish b device 2")


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()


def breaks_here() -> None:
    raise ValueError("a kernel broke")


def test_a_failure_is_raised_with_its_own_traceback(executor: Executor) -> None:
    later: list[str] = []
    run = executor.submit(STEPS, {**acting(STEPS, later), ("Step", "a"): breaks_here})
    asked = (
        lambda: run.wait("Step", "a"),
        lambda: run.wait("Step", "b"),
        lambda: run.perform("Publish", "b"),
        run.finish,
    )
    for ask in asked:
        with pytest.raises(ValueError, match="a kernel broke") as caught:
            ask()
        assert caught.value is run.failure
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "breaks_here" and frames.count("breaks_here") == 1
    assert run.failure.__notes__ == ["in Step a of step 1 (example), as the executor ran it"]
    assert run.done() and later == ["Fetch a"]


def test_what_was_launched_ends_before_the_failure_is_told(executor: Executor) -> None:
    """It would write to memory that the user takes to be free."""
    held = HeldTicket()
    run = executor.submit(STEPS, {("Fetch", "a"): lambda: held, ("Step", "a"): breaks_here})
    until(lambda: held.waits > 0)
    time.sleep(0.01)
    assert run.failure is None
    held.let_go()
    with pytest.raises(ValueError, match="a kernel broke"):
        run.finish()


def test_all_runs_under_way_fail_and_the_next_begins_afresh(executor: Executor) -> None:
    held = threading.Event()
    first = executor.submit(STEPS, {("Step", "a"): lambda: held.wait() and None, ("Step", "b"): breaks_here})
    second = executor.submit(STEPS, {("Step", "a"): lambda: None})
    held.set()
    for run in (second, first):
        with pytest.raises(ValueError, match="a kernel broke"):
            run.finish()
    third = executor.submit(program("Step a cpu -1:1", "Step b cpu -1:0"), {("Step", "a"): lambda: None})
    third.finish()


def test_a_failure_that_nobody_asked_for_is_told_by_the_next_call(executor: Executor) -> None:
    run = executor.submit(STEPS, {("Step", "a"): breaks_here})
    until(run.done)
    with pytest.raises(ValueError, match="a kernel broke"):
        executor.submit(STEPS, {})
    executor.submit(STEPS, {}).finish()
    run = executor.submit(STEPS, {("Step", "a"): breaks_here})
    until(run.done)
    with pytest.raises(ValueError, match="a kernel broke"):
        executor.close()
    executor.close()


def test_a_ticket_that_fails_is_a_failure(executor: Executor) -> None:
    """Whether the worker waits for it, or the user, or nobody."""
    for steps in (program("Fetch a down", "Step a cpu 0"), program("Fetch a down"), program("Step b cpu")):
        ticket = HeldTicket(OSError("the link broke"))
        ticket.let_go()
        actions = {(op.verb, op.what): lambda: None for op in steps.ops}
        if steps.has("Fetch", "a"):
            actions["Fetch", "a"] = lambda ticket=ticket: ticket
            with pytest.raises(OSError, match="the link broke"):
                executor.submit(steps, actions).finish()
        else:
            executor.submit(steps, actions).finish()


def test_a_device_op_that_fails_fails_the_run(executor: Executor) -> None:
    run = executor.submit(
        program("Publish a device", "Step a cpu 0"), {("Publish", "a"): breaks_here, ("Step", "a"): lambda: None}
    )
    with pytest.raises(ValueError, match="a kernel broke"):
        run.perform("Publish", "a")
    with pytest.raises(ValueError, match="a kernel broke"):
        run.wait("Step", "a")
    executor.submit(STEPS, {}).finish()


def test_an_op_that_nobody_can_perform_any_more_is_a_failure(executor: Executor) -> None:
    steps = program("Publish a device", "Step a cpu -1:0")
    actions = {("Publish", "a"): lambda: None, ("Step", "a"): lambda: None}
    executor.submit(steps, actions)
    run = executor.submit(steps, actions)
    with pytest.raises(StateError, match=r"comes after Publish a of step 1.*its run has been dropped"):
        run.finish()


@pytest.mark.parametrize("where", ["before its first op", "between two"])
def test_a_thread_that_dies_fails_its_runs(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of any op, where nothing but the thread itself could tell: as where the native library is missing."""

    def dies(*arguments: object) -> None:
        raise OSError("the library is gone")

    executor = Executor()
    if where == "between two":
        executor.submit(STEPS, {("Step", "a"): lambda: None}).finish()
        monkeypatch.setattr("zerokern.schedule.worker.Worker._next", dies)
    else:
        monkeypatch.setattr("zerokern.schedule.worker.native.cpus", dies)
    with pytest.raises(OSError, match="the library is gone"):
        executor.submit(STEPS, {("Step", "a"): lambda: None}).wait("Step", "a")
    monkeypatch.undo()
    with pytest.raises(OSError, match="the library is gone"):
        executor.submit(STEPS, {})
    executor.close()


def test_closing_ends_what_has_not_begun(executor: Executor) -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go_on.wait()
        seen.append("a")

    run = executor.submit(STEPS, {("Step", "a"): slow, ("Step", "b"): lambda: seen.append("b")})
    begun.wait()
    threading.Thread(target=lambda: (until(lambda: executor._worker.closing), go_on.set())).start()
    executor.close()
    assert seen == ["a"]
    run.wait("Step", "a")
    with pytest.raises(StateError, match=r"step 1 \(example\) had not ended when its executor closed"):
        run.finish()
    with pytest.raises(StateError, match="this executor is closed"):
        executor.submit(STEPS, {})


def interrupted(wait: Callable[[], None]) -> None:
    """An interrupt that comes before the wait is as good."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    wait()


def test_ctrl_c_leaves_a_wait_and_nothing_else(executor: Executor) -> None:
    go_on, seen = threading.Event(), []
    run = executor.submit(STEPS, {**acting(STEPS, seen), ("Step", "a"): lambda: go_on.wait() and None})
    held = HeldTicket()
    for waits in (lambda: run.wait("Step", "b"), lambda: run.perform("Publish", "b"), run.finish):
        with pytest.raises(KeyboardInterrupt):
            interrupted(waits)
    go_on.set()
    run.finish()
    assert seen == ["Fetch a", "Step b", "Publish a", "Publish b"]
    run = executor.submit(STEPS, {("Fetch", "a"): lambda: held})
    with pytest.raises(KeyboardInterrupt):
        interrupted(run.finish)
    held.let_go()
    run.finish()


def test_a_device_op_is_finished_before_ctrl_c_and_a_second_one_fails_the_run(executor: Executor) -> None:
    """How far the op came then, nobody can say."""
    done: list[int] = []

    def publish(signals: int) -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        done.append(signals)

    for signals, left in (1, [1]), (2, [1]):
        run = executor.submit(STEPS, {("Publish", "a"): partial(publish, signals)})
        with pytest.raises(KeyboardInterrupt):
            run.perform("Publish", "a")
        assert done == left
        with nullcontext() if signals == 1 else pytest.raises(KeyboardInterrupt):
            run.finish()


ENDS = """
import os, sys, threading, time
import torch
from zerokern.core.errors import StateError
from zerokern.memory import Copies
from zerokern.schedule.executor import Executor
from zerokern.examples.played_device import PlayedDevice
from zerokern.schedule.program import Op, StepProgram, Ref

STEPS = StepProgram("example", (
    Op("Fetch", "a", "down"), Op("Step", "a", "cpu"), Op("Publish", "a", "device"), Op("Step", "b", "cpu", (Ref(2),))
))

def under_way(action):
    executor = Executor()
    actions = {("Step", "a"): action, ("Publish", "a"): lambda: None, ("Step", "b"): lambda: None}
    return executor, executor.submit(STEPS, actions)

def busy():
    return under_way(lambda: [sum(range(1000)) for _ in range(10_000)] and None)

def failed():
    return under_way(lambda: 1 / 0)

def computing():
    return under_way(lambda: torch.ones(1 << 22).exp_() is None or None)

def copying():
    device = PlayedDevice(down_gb_s=0.00001)  # it would take 400 s
    copies, executor = Copies(device), Executor()
    here, there = torch.ones(1 << 20), torch.ones(1 << 20)
    steps = StepProgram("example", (Op("Fetch", "a", "down"), Op("Step", "a", "cpu", (Ref(0),))))
    actions = {("Fetch", "a"): lambda: copies.to_host(here, there), ("Step", "a"): lambda: None}
    return copies, executor, executor.submit(steps, actions)

def together():
    global kept
    kept = busy(), failed(), computing(), copying()
    time.sleep(0.05)
    raise SystemExit(3)

def forked():
    go_on = threading.Event()  # in the fork nobody sets it
    executor, run = under_way(lambda: go_on.wait() and None)
    over, unused = Executor(), Executor()
    ended = over.submit(STEPS, {("Step", "a"): lambda: None})
    ended.finish()
    device = PlayedDevice()
    mark = device.launch(go_on.wait)
    child = os.fork()
    if child:
        go_on.set()
        assert os.waitpid(child, 0)[1] == 0
        run.finish()
        return executor
    asked = [lambda: executor.submit(STEPS, {}), lambda: run.wait("Step", "a"), run.finish]
    for call in [*asked, mark.wait, device.synchronize, lambda: device.launch(None)]:
        try:
            call()
        except StateError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("no error")
    ended.finish()
    executor.close()
    unused.submit(STEPS, {("Step", "a"): lambda: None}).finish()
    return executor

for end in (together, forked):
    sys.stdout.flush()
    began, child = time.monotonic(), os.fork()
    if child == 0:
        kept = end()
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(end.__name__, status, "late" if time.monotonic() - began > 120 else "in time")
else:
    sys.stdout.flush()
    os._exit(0)  # all that was to end has ended
"""


def test_the_interpreter_ends_with_work_under_way_and_a_fork_has_no_worker() -> None:
    ran = run_forked(ENDS, ends=True, timeout=600)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("together 3 in time\nforked 0 in time\n", "", 0)
