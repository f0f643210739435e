"""Implementations: the forced one is the one that runs, all give the reference's bits, and threads never show."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
from kernel_cases import (
    SETS,
    Case,
    assert_same,
    cases_of,
    every_impl,
    every_set,
    hyperparameters,
    make_rows,
    run_op,
    run_reference,
    same_bits,
)
from tables import each

import zerokern as zk
from zerokern.core import native
from zerokern.core.errors import BackendError
from zerokern.kernels import dispatch, ops

EXACT = Case("bf16", "fp32", "split16", "bf16")
HYPER = {"lr": 0.1, "weight_decay": 0.1, "step": 3}


def test_the_forced_set_is_the_active_one() -> None:
    """Forcing by the environment: `tests/core/test_native.py`."""
    before = native.isa_active()
    for name in native.isa_usable():
        native.force_isa(name)
        assert native.isa_active() == name
    native.force_isa(None)
    assert native.isa_active() == before


@every_set
def test_an_op_forces_a_set_for_its_own_call_only(native_impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = native.library().zk_convert
    monkeypatch.setattr(native.library(), "zk_convert", lambda *a: seen.append(native.isa_active()) or real(*a))
    before = native.isa_active()
    ops.split(torch.ones(3), "split16", impl=native_impl)
    assert seen == [native_impl.removeprefix("cpu.")]
    assert native.isa_active() == before


def test_kernels_ask_for_memory_ahead() -> None:
    """GCC deleted all calls of functions that only prefetched; no result shows that."""
    intel = rb"\x0f\x18[\x08-\x0f\x48-\x4f\x88-\x8f]"  # prefetcht0
    arm = rb"[\x00\x20\x40\x60\x80\xa0\xc0\xe0].[\x80-\xbf]\xf9"  # prfm pldl1keep
    code = Path(zk.get_library()).read_bytes()
    found = re.findall(arm if platform.machine() in ("aarch64", "arm64") else intel, code, re.DOTALL)
    assert len(found) > 100  # 14 where all but the roof's were gone


@each("name", ["mmx", "AVX2", "", "cpu.avx2"])
def test_a_missing_set_is_refused_and_the_present_ones_listed(name: str) -> None:
    before = native.isa_active()
    with pytest.raises(BackendError) as error:
        native.force_isa(name)
    assert repr(name) in str(error.value)
    for usable in native.isa_usable():
        assert usable in str(error.value)
    assert native.isa_active() == before


@each("asked", ["cpu.mmx", "avx2", "cuda", ""])
def test_a_missing_implementation_is_refused_and_nothing_written(asked: str) -> None:
    param = torch.ones(3)
    with pytest.raises(BackendError) as error:
        ops.sgd(param, torch.ones(3), lr=1.0, impl=asked)
    assert repr(asked) in str(error.value)
    for usable in dispatch.available():
        assert usable in str(error.value)
    assert param.tolist() == [1.0] * 3


@each("algorithm", ["adam", "lion", "adagrad", "sgd", "muon"])
def test_the_reference_is_an_implementation(algorithm: str) -> None:
    case = cases_of(algorithm, False)[0] if algorithm == "muon" else EXACT
    rows = make_rows(algorithm, case, (0, 5, 300))
    expected = [row.clone() for row in rows]
    hyper = hyperparameters(algorithm, case)
    run_op(algorithm, rows, hyper, "reference")
    run_reference(algorithm, expected, hyper)
    assert_same(rows, expected)


@each("state", ["fp32", "bf16", "int8"])
@every_set
def test_threads_do_not_show(native_impl: str, state: str) -> None:
    before = make_rows("adam", Case("bf16", state, "split16", "bf16"), (300_001, 5, 70_000, 129))
    results = []
    for threads in (1, 3, 8):
        native.set_threads(threads)
        results.append([row.clone() for row in before])
        run_op("adam", results[-1], HYPER, native_impl)
        assert_same(results[-1], results[0])


@every_set
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


@every_impl
def test_rows_of_different_formats_share_a_call(impl: str) -> None:
    formats = (("fp32", "fp32", "fp32"), ("bf16", "bf16", "none.bf16"), ("fp16", "fp32", "none.fp16"))
    rows = [make_rows("lion", Case(*one, "none"), (200,))[0] for one in formats]
    expected = [row.clone() for row in rows]
    run_op("lion", rows, HYPER, impl)
    run_reference("lion", expected, HYPER)
    assert_same(rows, expected)


def test_flush_to_zero_of_the_caller_stays_and_does_not_reach_the_kernels() -> None:
    tiny = torch.full((40_000,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a CPU that can flush denormals")
    seen, kept = [], []
    try:
        for impl in SETS:
            halves = torch.empty_like(tiny)
            seen.append((impl, ops.sumsq(tiny, impl=impl), halves))
            ops.cast(tiny, halves, scale=0.5, impl=impl)
            kept.append((torch.tensor([1e-40]) * 0.5).item())
    finally:
        torch.set_flush_denormal(False)
    for impl, total, halves in seen:
        assert total > 0 and same_bits(halves, tiny * 0.5), impl
    assert kept == [0.0] * len(SETS)
