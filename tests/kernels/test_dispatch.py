"""Implementations: the forced one is the one that runs, all give the reference's bits, and threads never show."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from forked import run_forked
from kernel_cases import Case, assert_same, hyperparameters, make_rows, run_op, run_reference, same_bits
from tries import best

from zerokern.core import native
from zerokern.core.errors import BackendError
from zerokern.kernels import dispatch, ops

EXACT = Case("bf16", "fp32", "split16", "bf16")
HYPER = {"lr": 0.1, "weight_decay": 0.1, "step": 3}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which has not opened the native library yet."""
    return run_forked(code, env=os.environ | environment)


def compiled_sets() -> list[str]:
    return native.isa_names()


@pytest.mark.parametrize("name", compiled_sets())
def test_the_forced_set_is_the_active_one(name: str) -> None:
    if name not in native.isa_usable():
        pytest.skip(f"needs instruction set {name}")
    before = native.isa_active()
    native.force_isa(name)
    assert native.isa_active() == name
    native.force_isa(None)
    assert native.isa_active() == before


@pytest.mark.parametrize("name", compiled_sets())
def test_the_environment_forces_a_set(name: str) -> None:
    if name not in native.isa_usable():
        pytest.skip(f"needs instruction set {name}")
    done = run_python("from zerokern.core import native; print(native.isa_active())", ZEROKERN_CPU_ISA=name)
    assert (done.stdout.strip(), done.returncode) == (name, 0), done.stderr


def test_an_op_forces_a_set_for_its_own_call_only(native_impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = native.library().zk_convert
    monkeypatch.setattr(native.library(), "zk_convert", lambda *a: seen.append(native.isa_active()) or real(*a))
    before = native.isa_active()
    ops.split(torch.ones(3), "split16", impl=native_impl)
    assert seen == [native_impl.removeprefix("cpu.")]
    assert native.isa_active() == before


@pytest.mark.parametrize("name", ["mmx", "AVX2", "", "cpu.avx2"])
def test_a_missing_set_is_refused_and_the_present_ones_listed(name: str) -> None:
    before = native.isa_active()
    with pytest.raises(BackendError) as error:
        native.force_isa(name)
    assert repr(name) in str(error.value)
    for usable in native.isa_usable():
        assert usable in str(error.value)
    assert native.isa_active() == before


@pytest.mark.parametrize("asked", ["cpu.mmx", "avx2", "cuda", ""])
def test_a_missing_implementation_is_refused_and_nothing_written(asked: str) -> None:
    param = torch.ones(3)
    with pytest.raises(BackendError) as error:
        ops.sgd(param, torch.ones(3), lr=1.0, impl=asked)
    assert repr(asked) in str(error.value)
    for usable in dispatch.available():
        assert usable in str(error.value)
    assert param.tolist() == [1.0] * 3


def test_a_missing_set_in_the_environment_is_refused() -> None:
    done = run_python("from zerokern.core import native; native.library()", ZEROKERN_CPU_ISA="mmx")
    assert done.returncode != 0
    assert "BackendError" in done.stderr and "'mmx'" in done.stderr and "scalar" in done.stderr


def test_a_library_with_another_abi_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.raises(BackendError, match=rf"ABI {native.ABI - 1}.*ABI {native.ABI}"):
        native.library.__wrapped__()


@pytest.mark.parametrize("algorithm", ["adam", "lion", "adagrad", "sgd"])
def test_the_reference_is_an_implementation(algorithm: str) -> None:
    rows = make_rows(algorithm, EXACT, (0, 5, 300))
    expected = [row.clone() for row in rows]
    hyper = hyperparameters(algorithm, EXACT)
    run_op(algorithm, rows, hyper, "reference")
    run_reference(algorithm, expected, hyper)
    assert_same(rows, expected)


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_threads_do_not_show(native_impl: str, state: str) -> None:
    results = []
    for threads in (1, 2, 3, 8):
        native.set_threads(threads)
        rows = make_rows("adam", Case("bf16", state, "split16", "bf16"), (300_001, 5, 70_000, 129))
        run_op("adam", rows, HYPER, native_impl)
        results.append(rows)
    for rows in results[1:]:
        assert_same(rows, results[0])


def test_stochastic_rounding_does_not_show_threads(native_impl: str) -> None:
    results = []
    for threads in (1, 3):
        native.set_threads(threads)
        rows = make_rows("sgd", Case("fp32", "none", "none.bf16.random", "none"), (300_001,))
        run_op("sgd", rows, {"lr": 0.1, "stochastic_seed": 3, "step": 2}, native_impl)
        results.append(rows)
    assert_same(results[1], results[0])


def test_a_list_of_tensors_is_one_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = native.library().zk_update
    monkeypatch.setattr(native.library(), "zk_update", lambda *a: calls.append(a[1]) or real(*a))
    rows = make_rows("adam", EXACT, (3, 0, 500, 40_000))
    run_op("adam", rows, HYPER)
    assert calls == [4]


def test_rows_of_different_formats_share_a_call(impl: str) -> None:
    rows = [
        make_rows("lion", Case(grad, state, target, "none"), (200,))[0]
        for grad, state, target in (
            ("fp32", "fp32", "fp32"),
            ("bf16", "bf16", "none.bf16"),
            ("fp16", "fp32", "none.fp16"),
        )
    ]
    expected = [row.clone() for row in rows]
    run_op("lion", rows, HYPER, impl)
    run_reference("lion", expected, HYPER)
    assert_same(rows, expected)


def test_flush_to_zero_of_the_caller_does_not_reach_the_kernels(native_impl: str) -> None:
    tiny = torch.full((40_000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a CPU that can flush denormals")
    try:
        total = ops.sumsq(tiny, impl=native_impl)
        halves = torch.empty_like(tiny)
        ops.cast(tiny, halves, scale=0.5, impl=native_impl)
    finally:
        torch.set_flush_denormal(False)
    assert total > 0
    assert same_bits(halves, tiny * 0.5)


def test_the_caller_keeps_its_own_flush_to_zero(native_impl: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a CPU that can flush denormals")
    try:
        ops.sumsq(torch.ones(40_000), impl=native_impl)
        assert (torch.tensor([1e-40]) * 0.5).item() == 0.0
    finally:
        torch.set_flush_denormal(False)


def test_a_child_of_fork_steps_too() -> None:
    native.set_threads(2)
    tensor = torch.ones(200_000)
    assert ops.sumsq(tensor) == 200_000
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ops.sumsq(tensor) == 200_000 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ops.sumsq(tensor) == 200_000


def test_many_python_threads_may_step_at_once() -> None:
    native.set_threads(3)
    expected = make_rows("adam", EXACT, (100_000,))
    run_op("adam", expected, HYPER)
    results = [make_rows("adam", EXACT, (100_000,)) for _ in range(6)]
    workers = [threading.Thread(target=run_op, args=("adam", rows, HYPER)) for rows in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for rows in results:
        assert_same(rows, expected)


@pytest.mark.serial
def test_the_gil_is_free_during_a_call() -> None:
    """A Python thread goes on in the middle of one long call, and not just before and after it."""
    native.set_threads(1)
    tensors = [torch.ones(1 << 22)] * 16

    def between_stamps() -> float:
        stamps: list[float] = []
        over = threading.Event()

        def stamp() -> None:
            while not over.is_set():
                stamps.append(time.perf_counter())

        thread = threading.Thread(target=stamp)
        thread.start()
        start = time.perf_counter()
        ops.sumsq(tensors)
        end = time.perf_counter()
        over.set()
        thread.join()
        quarter = (end - start) / 4
        return 1 / max(1, sum(start + quarter < moment < end - quarter for moment in stamps))

    assert best(between_stamps, 1 / 100) < 1 / 100
