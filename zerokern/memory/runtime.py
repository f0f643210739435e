"""Copies by address on CUDA streams, through the runtime library that torch has loaded.

Many copies are one call of cudaMemcpyBatchAsync if it is available, else cudaMemcpyAsync for each. The library's
version determines the signature, the driver's whether it works.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch

from zerokern.core.errors import ZerokernError, say_once

__all__ = ["Batches", "clear_cuda_error", "runtime_library", "with_a_context"]

BATCH_SINCE = 12080  # CUDA 12.8: with an argument for the copy at fault; from 13.0 on without
WITHOUT_FAULT = 13000
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses say which way
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Attributes(Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", c_uint),
    )


class Batches:
    """Batched copies by address on streams, through the functions of one CUDA runtime library.

    >>> class Runtime:  # stands in for libcudart
    ...     pass
    >>> Batches(Runtime(), runtime_version=12060, driver_version=13000).batched
    False
    """

    def __init__(self, library: Any, *, runtime_version: int, driver_version: int) -> None:
        self.batched = min(runtime_version, driver_version) >= BATCH_SINCE
        self._has_fault = runtime_version < WITHOUT_FAULT
        self._library = library
        self._functions: dict[str, Any] = {}
        self._attributes = Attributes(src_access_order=_STREAM_ORDER)

    def copy(self, stream: int, dsts: array[int], srcs: array[int], sizes: array[int]) -> None:
        """Queues copies that must not overlap in memory; they run in any order."""
        if stream == 0:
            raise ZerokernError(
                "copies were asked for on the legacy default stream, which waits for all others; make one"
            )
        if not sizes:
            return
        if self.batched:
            self._copy_batch(stream, dsts, srcs, sizes)
        else:
            copy = self._function("cudaMemcpyAsync", c_int, c_void_p, c_void_p, c_size_t, c_int, c_void_p)
            for dst, src, nbytes in zip(dsts, srcs, sizes, strict=True):
                self._check("cudaMemcpyAsync", copy(dst, src, nbytes, _DEFAULT_KIND, stream), 1, nbytes)

    def _copy_batch(self, stream: int, dsts: array[int], srcs: array[int], sizes: array[int]) -> None:
        words = (c_void_p, c_void_p, c_void_p, c_size_t, POINTER(Attributes), POINTER(c_size_t), c_size_t)
        fault = (POINTER(c_size_t),) if self._has_fault else ()
        copy = self._function("cudaMemcpyBatchAsync", c_int, *words, *fault, c_void_p)
        addresses = [values.buffer_info()[0] for values in (dsts, srcs, sizes)]
        at_fault = (byref(c_size_t()),) if self._has_fault else ()
        # one set of attributes, from copy 0 on
        code = copy(*addresses, len(sizes), byref(self._attributes), byref(c_size_t(0)), 1, *at_fault, stream)
        self._check("cudaMemcpyBatchAsync", code, len(sizes), sum(sizes))

    def attribute(self, number: int, device: int) -> int:
        """Returns an attribute of a device, a cudaDeviceAttr; 0 if the runtime does not know it."""
        value = c_int()
        code = self._function("cudaDeviceGetAttribute", c_int, POINTER(c_int), c_int, c_int)(
            byref(value), number, device
        )
        if code:
            self._function("cudaGetLastError", c_int)()
        return 0 if code else value.value

    def _function(self, name: str, *signature: Any) -> Any:
        """Returns a function of the library, looked up once; it releases the GIL."""
        if name not in self._functions:
            self._functions[name] = CFUNCTYPE(*signature)((name, self._library))
        return self._functions[name]

    def _check(self, function: str, code: int, count: int, nbytes: int) -> None:
        if code:
            name = self._function("cudaGetErrorName", c_char_p, c_int)(code).decode()
            self._function("cudaGetLastError", c_int)()  # else torch would find it and blame its next call
            raise ZerokernError(
                f"{function} refused {count} copies of {nbytes} bytes in all: {name} ({code}). Copies go between the "
                "memory of one GPU and pinned host memory; a stream that a CUDA graph captures takes none"
            )


def runtime_library() -> Batches | None:
    """Returns batched copies through the runtime that torch uses; None, with one warning, if that cannot be called."""
    try:
        library = _cudart()
    except OSError as error:
        say_once("zerokern.memory", f"copies are not batched: {error}")
        return None
    if library is None:
        return None
    versions = {}
    for function in ("cudaRuntimeGetVersion", "cudaDriverGetVersion"):
        version = c_int()
        if CFUNCTYPE(c_int, POINTER(c_int))((function, library))(byref(version)):
            return None
        versions[function] = version.value
    batches = Batches(
        library, runtime_version=versions["cudaRuntimeGetVersion"], driver_version=versions["cudaDriverGetVersion"]
    )
    if not batches.batched:
        say_once(
            "zerokern.memory",
            f"copies are not batched: {versions}, and cudaMemcpyBatchAsync needs {BATCH_SINCE} of both",
        )
    return batches


def clear_cuda_error() -> None:
    """Clears the error of a refused call, which the runtime would otherwise report at the next call."""
    with contextlib.suppress(OSError):
        library = _cudart()
        if library is not None:
            CFUNCTYPE(c_int)(("cudaGetLastError", library))()


@contextlib.contextmanager
def with_a_context() -> Iterator[None]:
    """Context manager that makes a device current on which this process has a context: this thread's if it is one.

    What asks the runtime for memory that no device owns makes a context on the current device, which is the first one
    in every new thread: a process on another GPU would hold half a gigabyte there for nothing. Where a device has
    failed none can be chosen, and memory is asked for or given back all the same.

    >>> with with_a_context(): pass
    """
    with contextlib.ExitStack() as chosen:
        with contextlib.suppress(Exception):
            chosen.enter_context(_device_with_a_context())
        yield


def _device_with_a_context() -> AbstractContextManager[object]:
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None or not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    current = torch.cuda.current_device()
    found = (index for index in (current, *range(torch.cuda.device_count())) if has_context(index))
    return torch.cuda.device(next(found, current))


def _cudart() -> Any:
    """Returns the CUDA runtime that torch has loaded; None for a torch without CUDA."""
    if torch.version.cuda is None:
        return None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
