"""The CUDA C++ kernels, compiled for the GPU that is there: sources, NVRTC through CuPy, a cache on disk.

A file of the cache is named by everything that went into it: sources, options, the version of NVRTC. It is written
beside its place, made durable and renamed, so that it is whole or not there; who comes second replaces it by the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerokern.core import env
from zerokern.core.errors import BackendError
from zerokern.kernels.triton.backend import INSTALL

__all__ = ["INSTALL", "INSTEAD", "binary", "cache_file", "compiler", "options", "sources"]

ENTRY = "index.cu"
INSTEAD = "zerokern.memory.Copies moves the tensors one by one, without a cast, on any GPU"
_DIGEST_NBYTES = 32


def sources() -> dict[str, str]:
    """The files of cuda/ by name, from the installed package or from the repository.

    >>> sorted(sources())
    ['gather.cuh', 'index.cu', 'numbers.cuh', 'ptx.cuh', 'scatter.cuh', 'spans.cuh', 'walk.cuh']
    """
    package = Path(__file__).parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / ENTRY).is_file():
            return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in (".cu", ".cuh")}
    raise BackendError(f"the CUDA sources are not beside this package ({package / 'cuda'}); install zerokern again")


def compiler() -> Any:
    """CuPy's module for NVRTC; a BackendError that says what to install where one of the two is missing."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise BackendError(
            f"CuPy is not here ({error}); the kernels of cuda/ need it; do: {INSTALL}. {INSTEAD}"
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:
        need = "CuPy found no NVRTC, which compiles the kernels of cuda/"
        install = "pip install nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)"
        raise BackendError(f"{need}; do: {install}. {INSTEAD}. It said: {error}") from error
    return nvrtc


def options(capability: tuple[int, int], supported: Sequence[int]) -> tuple[str, ...]:
    """NVRTC's options: machine code for this GPU, or, where it is newer than NVRTC, PTX that its driver completes.

    >>> options((9, 0), [80, 90])[0], options((12, 1), [80, 90])[0]
    ('--gpu-architecture=sm_90', '--gpu-architecture=compute_90')
    """
    wanted = 10 * capability[0] + capability[1]
    known = [arch for arch in supported if arch <= wanted]
    if not known:
        raise BackendError(f"NVRTC compiles for {list(supported)} and not for sm_{wanted}; do: {INSTALL}. {INSTEAD}")
    target = f"sm_{wanted}" if wanted in known else f"compute_{max(known)}"
    return (f"--gpu-architecture={target}", "--std=c++17", "--fmad=false")


def binary(capability: tuple[int, int], *, fresh: bool = False) -> bytes:
    """A module with all kernels for that architecture: from the cache, or compiled, as ``fresh`` does in any case."""
    nvrtc = compiler()
    files = sources()
    chosen = options(capability, nvrtc.getSupportedArchs())
    place = cache_file(files, chosen, nvrtc.getVersion())
    module = None if fresh else _read(place)
    if module is None:
        module = _compile(nvrtc, files, chosen)
        with contextlib.suppress(OSError):  # a folder that cannot be written costs the compilation again, nothing else
            _write(place, module)
    return module


def cache_file(files: dict[str, str], chosen: Sequence[str], version: Sequence[int]) -> Path:
    """Where the module made of these is kept.

    >>> cache_file({"index.cu": ""}, ["--fmad=false"], (13, 0)).suffix
    '.module'
    """
    key = hashlib.sha256(repr((sorted(files.items()), tuple(chosen), tuple(version))).encode()).hexdigest()
    return env.cache_folder() / "cuda" / f"{key}.module"


def _compile(nvrtc: Any, files: dict[str, str], chosen: Sequence[str]) -> bytes:
    headers = {name: text.encode() for name, text in files.items() if name != ENTRY}
    names = [name.encode() for name in headers]
    program = nvrtc.createProgram(files[ENTRY], ENTRY, list(headers.values()), names)
    try:
        try:
            nvrtc.compileProgram(program, chosen)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip()
            raise BackendError(
                f"NVRTC {nvrtc.getVersion()} refused cuda/{ENTRY} with {chosen}: {error}\n{log}"
            ) from error
        # CuPy takes the last byte of a cubin for the end of a string; it is the last of the ELF's headers, and zero
        return nvrtc.getPTX(program) if "compute_" in chosen[0] else nvrtc.getCUBIN(program) + b"\0"
    finally:
        nvrtc.destroyProgram(program)


def _read(place: Path) -> bytes | None:
    """What was written there; None where nothing is, or where something has damaged it."""
    try:
        data = place.read_bytes()
    except OSError:
        return None
    digest, module = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
    return module if hashlib.sha256(module).digest() == digest else None


def _write(place: Path, module: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    number, beside = tempfile.mkstemp(dir=place.parent, prefix=f"{place.stem[:16]}.", suffix=".part")
    try:
        with open(number, "wb") as file:
            file.write(hashlib.sha256(module).digest() + module)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)
    except BaseException:
        os.unlink(beside)
        raise
