"""Which copies `CudaDriver` gives to the copy engine and which to a kernel, without a GPU."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_cases import LARGE, Engine, Mark, Runtime, Stream, Tried, build
from tables import each

from zerokern.kernels.triton import backend
from zerokern.kernels.triton.ferry import ferry
from zerokern.memory import CudaDriver, span_copies, staging
from zerokern.memory.pairs import Pairs


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The copy engine's stand-in; copies below 16 KiB are small, and kernels have been tried."""
    monkeypatch.setenv("ZEROKERN_SMALL_COPIES", "16KiB")
    monkeypatch.setattr(span_copies, "_right", Tried())
    return Engine(Runtime(build(tmp_path)).library)


@pytest.fixture
def driver(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    """CUDA's, but for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: contextlib.nullcontext())
    monkeypatch.setattr(staging, "runtime_library", lambda: engine)
    monkeypatch.setattr(staging, "CudaMark", lambda stream: Mark())
    monkeypatch.setattr(CudaDriver, "pinned", lambda self, tensor: True)
    monkeypatch.setattr(backend, "check_device", lambda device: None)
    monkeypatch.setattr(backend, "capturing", lambda device: False)
    return CudaDriver("cuda:0")


def copies_right(driver: CudaDriver, numels: Sequence[int]) -> bool:
    sources = list(map(torch.randn, numels))
    targets = list(map(torch.zeros_like, sources))
    driver.copy(Stream(), list(zip(targets, sources, strict=True)))
    return all(map(torch.equal, targets, sources))


def test_small_tensors_of_one_call_do_not_go_to_the_copy_engine(engine: Engine, driver: CudaDriver) -> None:
    assert copies_right(driver, [*(n % 77 + 1 for n in range(300)), LARGE, 2 * LARGE])
    assert engine.calls == [[4 * LARGE, 8 * LARGE]], "302 copies before"


@each("pairs", [[], (), Pairs((), ())])
def test_an_empty_list_copies_nothing(pairs: Sequence[Any], engine: Engine, driver: CudaDriver) -> None:
    engine.calls.clear()
    driver.copy(Stream(), pairs)
    assert [call for call in engine.calls if call] == []


def test_a_driver_whose_first_copies_are_captured_has_cuda_s_kernel_afterwards(
    engine: Engine, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a capture nobody looks for it, for its first launch is a trial that the host waits for."""
    cuda, captures = types.ModuleType("zerokern.kernels.cuda"), [True]

    def available(device: torch.device) -> bool:
        assert not captures[0], "a kernel was looked for within a capture"
        return True

    cuda.available = available
    cuda.ferry_spans = lambda rows, device: ferry(rows, torch.empty(len(rows), dtype=torch.int64))
    monkeypatch.setitem(sys.modules, cuda.__name__, cuda)
    monkeypatch.setattr(backend, "capturing", lambda device: captures[0])
    driver = CudaDriver("cuda:0")  # made within it, too
    for captures[0], calls in ((True, [60]), (False, [])):
        engine.calls.clear()
        assert copies_right(driver, [n % 7 + 1 for n in range(60)])
        assert [len(call) for call in engine.calls if call] == calls
    assert [name for name, _ in driver._spans.ways] == ["CUDA", "Triton"]
