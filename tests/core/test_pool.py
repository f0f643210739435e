"""The thread pool: the GIL, forks, concurrent callers, and the caller's floating-point mode."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from zerokern import kernels
from zerokern.core import native


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = native.threads()
    yield
    native.set_threads(before)


def test_the_gil_is_free_during_a_call() -> None:
    """A Python thread beside a native call of one thread keeps its rate.

    If the call held the GIL the thread would get no turn at all: it would pause for the length of a call.
    """
    native.set_threads(1)
    p = torch.ones(1 << 24)
    state = [torch.zeros_like(p) for _ in range(3)]
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
    waited = sum(pause for pause in pauses if pause > 0.5 * one_call)
    assert waited < 0.1 * elapsed, f"the thread was kept waiting {waited:.3f} of {elapsed:.3f} s"


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
        for _ in range(20):
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
