"""The cache on disk; what is missing is said by name; nothing is imported early; launches go to torch's stream."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coroutine_machine import SOURCES

from zerokern.core import errors
from zerokern.kernels import cuda
from zerokern.kernels.cuda import loader, nvrtc

CODE = b"\x7fELF and so on"
GPU = torch.device("cuda", 0)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What was compiled, by a compiler that does nothing, into a cache of this test."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *args: (calls.append(args), CODE)[1])
    monkeypatch.setattr(loader, "_SOURCES", SOURCES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_a_source_is_compiled_once(compiles: list[tuple[Any, ...]], tmp_path: Path) -> None:
    first = loader.cubin("ferry.cu", 90)
    assert first.read_bytes() == CODE and first.parent == tmp_path / "zerokern/cuda"
    assert loader.cubin("ferry.cu", 90) == first and len(compiles) == 1
    text, name, architecture, words, headers = compiles[0]
    assert (name, architecture) == ("ferry.cu", 90) and text == (SOURCES / "ferry.cu").read_text()
    assert {"ptx.cuh", "ring.cuh"} <= {*headers} and "-DZK_STAGE=32768" in words


def test_what_it_was_made_from_is_in_its_name(
    compiles: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = {loader.cubin("ferry.cu", 90), loader.cubin("ferry.cu", 100)}
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 2))
    made.add(loader.cubin("ferry.cu", 90))
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in SOURCES.glob("*.cu*"):
        text = path.read_text()
        (changed / path.name).write_text(text + "\n" if path.name == "ring.cuh" else text)
    monkeypatch.setattr(loader, "_SOURCES", changed)
    made.add(loader.cubin("ferry.cu", 90))
    assert len(made) == len(compiles) == 4


def test_a_damaged_file_is_made_again(compiles: list[tuple[Any, ...]]) -> None:
    path = loader.cubin("ferry.cu", 90)
    for damage in (b"", CODE[:-1], CODE + b"more"):
        path.write_bytes(damage)
        assert loader.cubin("ferry.cu", 90).read_bytes() == CODE
    assert len(compiles) == 4


def test_nothing_half_written_is_left(compiles: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = loader.cubin("ferry.cu", 90).parent
    monkeypatch.setattr(loader.os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        loader.cubin("ferry.cu", 100)
    assert len([*folder.iterdir()]) == 1


def test_a_home_that_cannot_be_written(
    compiles: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = loader.cubin("ferry.cu", 90)
    assert path.read_bytes() == CODE and loader.cubin("ferry.cu", 90) == path and len(compiles) == 1
    path.unlink()


EARLY = """
import sys
import zerokern
from zerokern.kernels import cuda, flat
import torch
flat.flatten([torch.ones(3)], torch.zeros(3))
cuda.available(torch.device("cpu"))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"cupy", "cupy_backends"}), end=" ")
print("libnvrtc" in open("/proc/self/maps").read() and torch.version.cuda is None)
"""


def test_nothing_is_loaded_before_it_is_needed() -> None:
    ran = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert ran.stdout.split() == ["[]", "False"], ran.stderr


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with all that the kernels need, of which a test takes something away."""
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    monkeypatch.setattr(loader, "_cupy", lambda: cupy)
    monkeypatch.setattr(loader, "_SOURCES", SOURCES)
    monkeypatch.setattr(nvrtc, "missing", lambda architecture: None)
    loader._reason_of.cache_clear()
    yield cupy
    loader._reason_of.cache_clear()


def test_with_everything_they_run(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.reason(GPU) is None and cuda.available(GPU)


def without_cupy(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader.importlib.util, "find_spec", lambda name: None if name == "cupy" else name)


def with_an_old_gpu(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def with_an_old_driver(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    gpu.cuda.runtime.driverGetVersion = lambda: 12000


def with_a_broken_cupy(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libcudart.so.12 is not there")

    patch.setattr(loader, "_cupy", broken)


def without_nvrtc(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nvrtc, "missing", lambda architecture: "NVRTC was not found")


def without_sources(gpu: SimpleNamespace, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "_SOURCES", Path("/nowhere"))


@pytest.mark.parametrize(
    "take, says",
    [
        (without_cupy, r"cupy is not installed; do: pip install 'zerokern\[cuda\]'"),
        (with_an_old_gpu, "NVIDIA Test is sm_75, and they need sm_80 or newer"),
        (with_an_old_driver, "the driver is for CUDA 12.0, and they need 12.1 or newer"),
        (with_a_broken_cupy, "cupy cannot be used: libcudart.so.12 is not there"),
        (without_nvrtc, "NVRTC was not found"),
        (without_sources, "their sources are not in /nowhere: reinstall zerokern"),
    ],
)
def test_what_is_missing_is_said_once_by_name(
    take: Callable[..., None],
    says: str,
    gpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    take(gpu, monkeypatch)
    errors.say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [cuda.available(GPU) for _ in range(3)] == [False] * 3
    (line,) = (one.getMessage() for one in caplog.records if "zerokern.kernels.cuda" in one.getMessage())
    assert says.replace("\\", "") in line
    with pytest.raises(errors.BackendError, match=says):
        cuda.refuse_without(GPU, "ferry", "Tensor.copy_")


def test_an_nvrtc_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 0))
    assert "NVRTC is 12.0, and kernels with 32,764 bytes of arguments need 12.1" in nvrtc.missing()


class Streams:
    """CuPy's way to a stream, of one version."""

    null = nullcontext("null")

    def __init__(self, newer: bool) -> None:
        self.Stream = SimpleNamespace(null=self.null)
        if newer:
            self.Stream.from_external = lambda stream: ("external", stream.__cuda_stream__())
        self.ExternalStream = lambda address: ("old", address)


@pytest.mark.parametrize("newer, wanted", [(True, ("external", (0, 640))), (False, ("old", 640))])
def test_launches_go_to_torchs_stream(newer: bool, wanted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_cupy", lambda: SimpleNamespace(cuda=Streams(newer)))
    assert loader._cupy_stream(640) == wanted
    assert loader._cupy_stream(0) is Streams.null


def test_large_shared_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(max_dynamic_shared_size_bytes=0)
    module = SimpleNamespace(get_function=lambda name: made)
    monkeypatch.setattr(loader, "_cupy", lambda: SimpleNamespace(RawModule=lambda path: module))
    monkeypatch.setattr(loader, "cubin", lambda *args: Path("a.cubin"))
    for cached in (loader._module, loader._kernel):
        cached.cache_clear()
    loader._kernel("ferry.cu", "ferry_few", GPU, 90, 131104)
    assert made.max_dynamic_shared_size_bytes == 131104
    made.max_dynamic_shared_size_bytes = 0
    loader._kernel("ferry.cu", "ferry_few", GPU, 80, 0)
    assert made.max_dynamic_shared_size_bytes == 0
    for cached in (loader._module, loader._kernel):
        cached.cache_clear()


def test_the_library_of_torchs_cuda_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders were taken by name: cuda_nvrtc, of CUDA 12, came before cu13."""
    paths = [Path("cuda_nvrtc/lib/libnvrtc.so.12"), Path("cu13/lib/libnvrtc.so.13")]
    for said, first in ((None, 1), ("12.8", 0), ("13.0", 1)):
        monkeypatch.setattr(torch.version, "cuda", said)
        assert min(paths, key=nvrtc._preference) == paths[first]
