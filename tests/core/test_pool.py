"""The thread pool: the GIL, forks, concurrent callers, the CPUs it keeps to, and the caller's floating-point mode."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import run_forked
from tables import each
from tries import best

from zerokern import kernels
from zerokern.core import env, native


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before, cpus = native.threads(), native.cpus()
    yield
    native.set_threads(before)
    native.set_cpus(cpus)


@pytest.mark.serial
def test_the_gil_is_free_during_a_call() -> None:
    """A Python thread beside a native call of one thread keeps its rate.

    If the call held the GIL the thread would get no turn at all: it would pause for the length of a call.
    """
    native.set_threads(1)
    p = torch.ones(1 << 24)
    state = [torch.zeros_like(p) for _ in range(3)]

    def share_waited() -> float:
        pauses: list[float] = []
        done = threading.Event()

        def watch() -> None:
            last = time.perf_counter()
            while not done.is_set():
                now = time.perf_counter()
                pauses.append(now - last)
                last = now

        watcher = threading.Thread(target=watch)
        start = time.perf_counter()
        watcher.start()
        for step in range(1, 11):
            kernels.adam(p, state[0], state[1], state[2], lr=1e-3, step=step)
        elapsed = time.perf_counter() - start
        done.set()
        watcher.join()
        one_call = elapsed / 10
        return sum(pause for pause in pauses if pause > 0.5 * one_call) / elapsed

    assert best(share_waited, 0.1) < 0.1


TWOS = torch.full((1 << 20,), 2.0)  # made before any fork: torch's own OpenMP threads do not survive one


def total() -> float:
    return kernels.sumsq(TWOS)


def test_a_forked_child_has_a_working_pool() -> None:
    native.set_threads(2)
    expected = total()
    child = os.fork()
    if child == 0:
        os._exit(0 if total() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert total() == expected


def test_a_fork_while_another_thread_is_in_a_call() -> None:
    native.set_threads(2)
    stop = threading.Event()
    big = torch.ones(1 << 22)

    def busy() -> None:
        while not stop.is_set():
            kernels.sumsq(big)

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                os._exit(0 if total() == 4.0 * (1 << 20) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        worker.join()


def test_callers_at_once_each_get_their_own_result() -> None:
    native.set_threads(3)
    results: dict[int, set[float]] = {}

    def call(i: int) -> None:
        x = torch.full((1 << 17,), float(i))
        results[i] = {kernels.sumsq(x) for _ in range(30)}

    callers = [threading.Thread(target=call, args=(i,)) for i in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == {i: {float(i * i * (1 << 17))} for i in range(1, 5)}


def test_more_threads_than_cores_and_counts_that_change() -> None:
    for count in (1, 8, 3, 2, 16, 1):
        native.set_threads(count)
        assert total() == 4.0 * (1 << 20)


def test_flush_to_zero_of_the_caller_does_not_reach_the_kernels() -> None:
    tiny = torch.full((1 << 16,), 1e-41)
    out = torch.zeros_like(tiny)
    try:
        if not torch.set_flush_denormal(True):
            pytest.fail("this CPU cannot flush denormals, so nothing is proven")
        kernels.cast(tiny, out)
        assert torch.zeros(1).add_(1e-41).item() == 0.0, "the caller's own mode must come back"
    finally:
        torch.set_flush_denormal(False)
    assert out.view(torch.int32)[0].item() == tiny.view(torch.int32)[0].item() != 0
    assert out.view(torch.int32).unique().numel() == 1


CPUS = env.process_cpus()
FIRST, LAST = CPUS[0], CPUS[-1]


def where() -> list[str]:
    """The CPUs of each of the pool's own threads, as the kernel has them."""
    lists = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that is ending
            rows = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
            if rows["Name"] == "zerokern":
                lists.append(rows["Cpus_allowed_list"])
    return lists


def workers(count: int) -> list[str]:
    """Where they are, once that many threads, the caller among them, have been in a call."""
    native.set_threads(count)
    assert total() == 4.0 * (1 << 20)
    return where()


def test_threads_keep_to_the_cpus_given_those_to_come_too() -> None:
    mine = os.sched_getaffinity(0)
    native.set_cpus(None)
    assert set(workers(3)) == {env.cpu_list(CPUS)}
    before = len(where())
    native.set_cpus([LAST])
    assert native.cpus() == (LAST,)
    assert where() == [str(LAST)] * before
    assert workers(before + 4) == [str(LAST)] * (before + 3)
    assert workers(2) == [str(LAST)] * (before + 3)
    native.set_cpus(CPUS)
    assert set(where()) == {env.cpu_list(CPUS)} and native.cpus() == CPUS
    native.set_cpus([FIRST, FIRST])
    assert set(where()) == {str(FIRST)} and native.cpus() == (FIRST,)
    native.set_cpus(None)
    assert set(workers(before + 5)) == {env.cpu_list(CPUS)} and native.cpus() is None
    assert os.sched_getaffinity(0) == mine, "the caller is not moved"


def test_none_is_what_the_process_may_use_whoever_asks() -> None:
    """A thread that keeps to one CPU itself does not give its own CPUs to threads that were there."""
    native.set_cpus([LAST])
    workers(3)

    def ask() -> None:
        os.sched_setaffinity(0, {FIRST})
        native.set_cpus(None)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert set(where()) == {env.cpu_list(CPUS)}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_child_keeps_to_them() -> None:
    native.set_cpus([LAST])
    workers(3)
    child = os.fork()
    if child == 0:
        nobody = where() == [] and native.cpus() == (LAST,)
        os._exit(0 if nobody and workers(3) == [str(LAST)] * 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cpus_that_change_during_calls_change_no_result() -> None:
    native.set_threads(4)
    stop = threading.Event()

    def meddle() -> None:
        while not stop.is_set():
            for cpus in ([FIRST], [LAST], CPUS, None):
                native.set_cpus(cpus)

    meddler = threading.Thread(target=meddle)
    meddler.start()
    try:
        assert {total() for _ in range(200)} == {4.0 * (1 << 20)}
    finally:
        stop.set()
        meddler.join()


def in_child(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("ZEROKERN_THREADS", "LOCAL_WORLD_SIZE", "ZEROKERN_CPUS")}
    return run_forked("import os\nfrom zerokern.core import env, native\n" + program, env={**kept, **variables})


def test_the_environment_gives_them() -> None:
    say = "print(native.cpus(), native.threads())"
    assert in_child(say).stdout == f"None {env.usable_cpus()}\n"
    assert in_child(say, ZEROKERN_CPUS=str(LAST)).stdout == f"({LAST},) 1\n"
    assert in_child(say, ZEROKERN_CPUS=str(LAST), ZEROKERN_THREADS="5").stdout == f"({LAST},) 5\n"
    everything = in_child(say, ZEROKERN_CPUS=env.cpu_list(CPUS), LOCAL_WORLD_SIZE=str(len(CPUS)))
    assert everything.stdout == f"{CPUS} 1\n"
    # A launcher that binds the process leaves the pool what it was given.
    bound = f"os.sched_setaffinity(0, {{{FIRST}}})\n{say}"
    assert in_child(bound, ZEROKERN_CPUS=str(LAST)).stdout == f"({LAST},) 1\n"


@each("text", ["-1", "3-", "4-2", "one", "1,,2", "1;2"])
def test_a_list_that_is_none_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_CPUS", text)
    with pytest.raises(ValueError, match=r"ZEROKERN_CPUS=.* is no list of CPUs; allowed: numbers and ranges like"):
        env.given_cpus()


def test_cpus_that_are_not_there_are_named() -> None:
    ran = in_child("native.library()", ZEROKERN_CPUS=f"{FIRST},1023")
    assert ran.returncode == 1
    assert f"ValueError: ZEROKERN_CPUS='{FIRST},1023': must be CPUs that this process" in ran.stderr
    native.set_cpus([FIRST])
    for wrong in ((), (-1,), (1023,), (1024,), (1 << 40,), ("1",), (FIRST, 1 << 20)):
        with pytest.raises(ValueError, match=r"cpus=.*: must be CPUs that this process may use"):
            native.set_cpus(wrong)  # type: ignore[arg-type]
    assert native.cpus() == (FIRST,), "a refusal changes nothing"


@each("numbers", [(), (0,), (3, 4), (0, 2, 3, 4, 7, 9, 10), tuple(range(0, 40, 2))])
def test_lists_are_read_as_they_are_written(numbers: tuple[int, ...]) -> None:
    assert env.cpu_numbers(env.cpu_list(numbers)) == numbers
