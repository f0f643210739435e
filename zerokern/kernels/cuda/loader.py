"""Compiled CUDA kernels: a cache on disk, modules loaded through CuPy, launches on a stream of torch.

A cubin's file is named by what it was made from (sources, flags, architecture, compiler) and by its own checksum. So a
changed source is another file, and one that was damaged is not believed but made again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from zerokern.core.env import cache_folder, source_tree
from zerokern.core.errors import BackendError, say_once
from zerokern.kernels.cuda import nvrtc

__all__ = [
    "Stream",
    "architecture",
    "available",
    "cubin",
    "kernel",
    "placed",
    "reason",
    "refuse_without",
    "stage_bytes",
]

Stream: TypeAlias = "torch.cuda.Stream"
OLDEST = 80
FLAGS = ("-std=c++17", "-fmad=false")  # results are a fixed sequence of roundings
INSTALL = "pip install 'zerokern[cuda]', or zerokern[cuda12] for CUDA 12"
_SOURCES = (source_tree() or Path(__file__).resolve().parents[2] / "include") / "cuda"
_OLDEST_DRIVER = 12010


def reason(device: torch.device) -> str | None:
    """Returns why these kernels do not run on a device, or None if they do.

    >>> reason(torch.device("cpu"))
    'CUDA kernels run on cuda devices, not on cpu'
    """
    if device.type != "cuda":
        return f"CUDA kernels run on cuda devices, not on {device}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _reason_of(index)


def available(device: torch.device) -> bool:
    """Returns whether these kernels run on a device; what is missing is logged once by name.

    >>> available(torch.device("cpu"))
    False
    """
    missing = reason(device)
    if missing and device.type == "cuda":
        say_once(__name__, f"the kernels of zerokern.kernels.cuda are not used: {missing}")
    return not missing


@functools.cache
def _reason_of(index: int) -> str | None:
    for library in ("cupy", "numpy"):
        if importlib.util.find_spec(library) is None:
            return f"{library} is not installed; do: {INSTALL}"
    found = architecture(torch.device("cuda", index))
    if found < OLDEST:
        return f"{torch.cuda.get_device_name(index)} is sm_{found}, and they need sm_{OLDEST} or newer"
    try:
        driver = _cupy().cuda.runtime.driverGetVersion()
    except Exception as error:  # of CuPy: built for another CUDA, or its libraries are missing
        return f"cupy cannot be used: {error}"
    if driver < _OLDEST_DRIVER:
        return f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and they need 12.1 or newer"
    if not _SOURCES.is_dir():
        return f"their sources are not in {_SOURCES}: reinstall zerokern"
    return nvrtc.missing(found)


def architecture(device: torch.device) -> int:
    """Returns a device's compute capability as in sm_90.

    >>> architecture(torch.device("cuda")) >= 50 if torch.cuda.is_available() else True
    True
    """
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def stage_bytes(architecture: int) -> int:
    """Returns the bytes of a CTA's stage, of which it has four: sm_120 has shared memory for half as many.

    >>> stage_bytes(90), stage_bytes(120)
    (32768, 16384)
    """
    return 16384 if architecture // 10 == 12 else 32768


def cubin(source: str, architecture: int) -> Path:
    """Returns the file of a compiled source, compiled now unless it lies in the cache.

    >>> nvrtc.missing() is not None or not _SOURCES.is_dir() or cubin("ferry.cu", 90).suffix
    '.cubin'
    """
    headers = {path.name: path.read_text() for path in sorted(_SOURCES.glob("*.cuh"))}
    text = (_SOURCES / source).read_text()
    words = (*FLAGS, f"-DZK_STAGE={stage_bytes(architecture)}")
    made_from = repr((source, text, sorted(headers.items()), words, architecture, nvrtc.version()))
    stem = f"{Path(source).stem}-sm_{architecture}-{_digest(made_from.encode())}"
    for folder in (cache_folder() / "cuda", _own_folder()):
        for found in sorted(folder.glob(f"{stem}-*.cubin")):
            with suppress(OSError):
                if found.name == f"{stem}-{_digest(found.read_bytes())}.cubin":
                    return found
                found.unlink()
    code = nvrtc.compile_cubin(text, source, architecture, words, headers)
    try:
        return _kept(cache_folder() / "cuda", stem, code)
    except OSError:  # a home that cannot be written, or is full
        return _kept(_own_folder(), stem, code)


def _kept(folder: Path, stem: str, code: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{_digest(code)}.cubin"
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(name, path)  # another process sees all of it or nothing
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zerokern-cuda-")


def _own_folder() -> Path:
    """Returns a folder of this process, removed at its end."""
    return Path(_temporary().name)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def kernel(source: str, name: str, device: torch.device, shared: int) -> Callable[..., None]:
    """Returns a kernel, to be called with grid, block and arguments where `placed` says.

    >>> kernel("ferry.cu", "ferry_few", torch.device("cuda", 0), 0) if torch.cuda.is_available() else None
    """
    return _kernel(source, name, device, architecture(device), shared)


@functools.cache
def _kernel(source: str, name: str, device: torch.device, architecture: int, shared: int) -> Callable[..., None]:
    found = _module(source, device, architecture).get_function(name)
    if shared > 48 << 10:
        found.max_dynamic_shared_size_bytes = shared
    return functools.partial(_launch, found, shared)


def _launch(found: Any, shared: int, grid: int, block: int, parameters: Any) -> None:
    # An array of one element is passed by value; for one with fields CuPy has numpy list them all, at each launch.
    found((grid,), (block,), (parameters.view(f"V{parameters.nbytes}"),), shared_mem=shared)


@functools.cache
def _module(source: str, device: torch.device, architecture: int) -> Any:
    return _cupy().RawModule(path=str(cubin(source, architecture)))


def _cupy() -> Any:
    return importlib.import_module("cupy")


class _External:
    """A stream of torch as CuPy takes it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@contextmanager
def placed(device: torch.device, stream: Stream | None = None) -> Iterator[None]:
    """Launches within go to a device and to a stream of torch, its current one by default.

    >>> with placed(torch.device("cpu")): pass
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), nullcontext() if stream is None else torch.cuda.stream(stream):
        address = torch.cuda.current_stream(device).cuda_stream
        with _cupy_stream(address):
            yield


def _cupy_stream(address: int) -> Any:
    streams = _cupy().cuda
    if not address:
        return streams.Stream.null
    if hasattr(streams.Stream, "from_external"):  # from 14 on
        return streams.Stream.from_external(_External(address))
    return streams.ExternalStream(address)


def refuse_without(device: torch.device, what: str, instead: str) -> None:
    """Raises where the kernels do not run on a device.

    >>> refuse_without(torch.device("cpu"), "ferry", "Tensor.copy_")
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: ferry: CUDA kernels run on cuda devices, not on cpu; what runs instead: ...
    """
    found = reason(device)
    if found:
        raise BackendError(f"{what}: {found}; what runs instead: {instead}")
