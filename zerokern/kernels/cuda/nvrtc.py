"""Compiles CUDA sources to cubins by NVRTC, called through ctypes. It needs no GPU, no toolkit and no header of CUDA.

NVRTC lies where torch's CUDA builds have it (the wheel `nvidia-cuda-nvrtc`), where the system has it, or where CuPy
finds it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from zerokern.core.errors import BackendError

__all__ = ["OLDEST", "compile_cubin", "library", "missing", "version"]

OLDEST = (12, 1)  # the first to allow 32,764 bytes of kernel arguments
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
INSTALL = "pip install nvidia-cuda-nvrtc"


def missing(architecture: int | None = None) -> str | None:
    """Returns why NVRTC cannot be used here, or not for sm_`architecture`; None if it can.

    >>> reason = missing(90)
    >>> reason is None or "NVRTC" in reason
    True
    """
    try:
        found = version()
    except BackendError as error:
        return str(error)
    if found < OLDEST:
        return "NVRTC is {}.{}, and kernels with 32,764 bytes of arguments need {}.{}".format(*found, *OLDEST)
    if architecture is not None and architecture not in _architectures():
        return "NVRTC {}.{} does not know sm_{}; do: {}".format(*found, architecture, INSTALL)
    return None


def _architectures() -> list[int]:
    number = ctypes.c_int()
    _check(library().nvrtcGetNumSupportedArchs(ctypes.byref(number)), "nvrtcGetNumSupportedArchs")
    known = (ctypes.c_int * number.value)()
    _check(library().nvrtcGetSupportedArchs(known), "nvrtcGetSupportedArchs")
    return list(known)


def version() -> tuple[int, int]:
    """Returns NVRTC's version.

    >>> missing() is not None or version() >= OLDEST
    True
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@functools.cache
def library() -> ctypes.CDLL:
    """Loads NVRTC; a BackendError says where it was looked for.

    >>> missing() is not None or library().nvrtcVersion is not None
    True
    """
    found = [path for folder in _wheel_folders() for path in folder.glob("libnvrtc.so.*")]
    for path in (*map(str, sorted(found, key=_preference)), *_NAMES):
        with suppress(OSError):
            return ctypes.CDLL(path)
    with suppress(Exception):  # CuPy knows more places, and what it has loaded is found by name
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
        for name in _NAMES:
            with suppress(OSError):
                return ctypes.CDLL(name)
    raise BackendError(f"NVRTC was not found, neither as {' nor as '.join(_NAMES)} nor in a wheel; do: {INSTALL}")


def compile_cubin(
    source: str, name: str, architecture: int, options: Sequence[str], headers: Mapping[str, str]
) -> bytes:
    """Compiles `source` for sm_`architecture`; `headers` are what it may include, by name.

    >>> source = 'extern "C" __global__ void nothing() {}'
    >>> missing() is not None or compile_cubin(source, "nothing.cu", 90, (), {})[:4]
    b'\\x7fELF'
    """
    nvrtc, program = library(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(one.encode() for one in headers))
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
    _check(made, "nvrtcCreateProgram")
    try:
        words = [f"-arch=sm_{architecture}", *options]
        given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        code = nvrtc.nvrtcCompileProgram(program, len(words), given)
        if code:
            log = _text(nvrtc, "ProgramLog", program).decode(errors="replace").strip("\0\n ")
            raise BackendError(
                f"NVRTC {version()} refused {name} for sm_{architecture} ({_error(nvrtc, code)}):\n{log}"
            )
        return _text(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, text), f"nvrtcGet{what}")
    return text.raw


def _preference(path: Path) -> tuple[bool, int]:
    """Orders libraries: that of torch's CUDA first, whose driver is there, then the newest.

    >>> _preference(Path("libnvrtc.so.13"))[1] < _preference(Path("libnvrtc.so.12"))[1]
    True
    """
    major = path.name.removeprefix("libnvrtc.so.").partition(".")[0]
    return major != (torch.version.cuda or "").partition(".")[0], -int(major) if major.isdecimal() else 0


def _wheel_folders() -> list[Path]:
    """Folders of libraries in NVIDIA's wheels: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("*/lib"), reverse=True)]


def _error(nvrtc: ctypes.CDLL, code: int) -> str:
    text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(("nvrtcGetErrorString", nvrtc))
    return (text(code) or b"").decode()


def _check(code: int, call: str) -> None:
    if code:
        raise BackendError(f"{call} failed: {_error(library(), code)}")
