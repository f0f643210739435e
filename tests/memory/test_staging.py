"""Batched copies: the runtime's functions get what their headers say, whichever version it is; a refusal is told."""

from __future__ import annotations

import ctypes
import logging
from array import array
from pathlib import Path

import pytest
import torch
from runtime_cases import STREAM, Runtime, build
from tables import each

from zerokern.core.errors import ZerokernError, say_once
from zerokern.memory.runtime import Batches, runtime_library


@pytest.fixture(scope="session", params=[12090, 13000], ids=lambda version: f"CUDA {version // 1000}")
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="session")
def library(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-DZEROKERN_FAULT_ARGUMENT"] if version < 13000 else []
    return build(tmp_path_factory.mktemp("runtime"), *flags)


@pytest.fixture
def runtime(library: Path) -> Runtime:
    return Runtime(library)


def words(tensors: list[torch.Tensor]) -> array:
    return array("Q", [tensor.data_ptr() for tensor in tensors])


def copied(batches: Batches, count: int) -> bool:
    sources = [torch.randint(0, 256, (n + 1,), dtype=torch.uint8) for n in range(count)]
    targets = [torch.zeros_like(source) for source in sources]
    batches.copy(STREAM, words(targets), words(sources), array("Q", [source.numel() for source in sources]))
    return all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


@each("count", [1, 2, 1000])
def test_a_batch_is_one_call(runtime: Runtime, version: int, count: int) -> None:
    runtime.reset()
    batches = Batches(runtime.library, runtime_version=version, driver_version=13000)
    assert batches.batched and copied(batches, count)
    expected = {"one": 0, "many": 1, "count": count, "order": 1, "flags": 0, "stream": STREAM, "cleared": 0}
    assert runtime.asked == expected


@each("versions", [(12060, 13000), (13000, 12070)])
def test_an_old_runtime_or_driver_copies_one_by_one(runtime: Runtime, versions: tuple[int, int]) -> None:
    runtime.reset()
    batches = Batches(runtime.library, runtime_version=versions[0], driver_version=versions[1])
    assert not batches.batched and copied(batches, 5)
    asked = runtime.asked
    assert (asked["one"], asked["many"], asked["order"], asked["stream"]) == (5, 0, 4, STREAM)


@each("driver", [13000, 12000])
def test_a_refusal_is_told_and_does_not_linger(runtime: Runtime, version: int, driver: int) -> None:
    batches = Batches(runtime.library, runtime_version=version, driver_version=driver)
    runtime.reset(refusal=1)
    name = "cudaMemcpyBatchAsync" if driver == 13000 else "cudaMemcpyAsync"
    with pytest.raises(
        ZerokernError, match=rf"{name} refused \d copies of \d bytes in all: cudaErrorOfTheStandIn \(1\)"
    ):
        copied(batches, 3)
    assert runtime.asked["cleared"] == 1, "torch would blame its next call"


def test_the_legacy_default_stream_is_refused(runtime: Runtime, version: int) -> None:
    batches = Batches(runtime.library, runtime_version=version, driver_version=version)
    with pytest.raises(ZerokernError, match="the legacy default stream, which waits for all others"):
        batches.copy(0, array("Q", [1]), array("Q", [1]), array("Q", [1]))
    assert runtime.asked["many"] == 0


def test_the_stand_in_has_the_signatures_of_the_headers(tmp_path: Path) -> None:
    """The header's version of a function that differs would not compile beside the stand-in's."""
    headers = sorted(Path("/usr/local").glob("cuda-1[3-9]*/include/cuda_runtime_api.h"))
    if not headers:
        pytest.skip("needs nvcc")
    build(tmp_path, "-DZEROKERN_HEADER", f"-I{headers[-1].parent}")


def test_torch_without_cuda_has_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runtime_library() is None


def test_a_runtime_that_is_not_there_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="zerokern.memory"):
        assert runtime_library() is None and runtime_library() is None
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("copies are not batched: libcudart.so.99")


def test_the_runtime_of_torch_is_found(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked = []

    def load(name: str) -> ctypes.CDLL:
        asked.append(name)
        return Runtime(library).library

    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(name) if name.startswith("libcudart") else real(name))
    found = runtime_library()
    assert asked == ["libcudart.so.13"] and found is not None and found.batched


real = ctypes.CDLL
