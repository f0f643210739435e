"""Tickets, and the CUDA streams and events that order copies to and from a GPU.

Many copies are one call of cudaMemcpyBatchAsync if it is available, else cudaMemcpyAsync for each. The runtime library
is the one that torch has loaded; its version determines the signature, the driver's whether it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerokern.core.errors import BackendError, ZerokernError, got, say_once

__all__ = [
    "EMULATED_DRIVERS", "STREAMS", "Batches", "CudaDriver", "CudaMark", "Ticket", "check_stream_name",
    "clear_cuda_error", "cuda_driver", "driver_of", "runtime_library", "stream_gate", "stream_ticket",
]  # fmt: skip

BATCH_SINCE = 12080  # CUDA 12.8: with an argument for the copy at fault; from 13.0 on without
WITHOUT_FAULT = 13000
_DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses say which way
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
STREAMS = ("down", "up", "gather", "reduce", "publish")
"""All streams that a process has on a device beside the program's: two for copies, three to launch collectives from."""
# torch's pool has 32 streams for each priority and never frees one; the 33rd request gets the first again, which may be
# the one that NCCL runs on. So a process that makes a thousand models draws as many as one that makes one.
_CUDA_STREAMS: dict[tuple[int, str], torch.cuda.Stream] = {}
_CUDA_DRIVERS: weakref.WeakValueDictionary[int, CudaDriver] = weakref.WeakValueDictionary()
_MAKING = threading.Lock()
EMULATED_DRIVERS = WeakTensorKeyDictionary()
"""Tensors on devices that torch does not know, with their drivers: who plays a device writes its tensors in here."""


class Ticket(Protocol):
    """What fetch and store return: a transfer that ends, successfully or not."""

    def wait(self) -> None:
        """Waits until it has ended; raises its error."""

    def done(self) -> bool:
        """Returns whether it has ended."""


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


def _cudart() -> Any:
    """Returns the CUDA runtime that torch has loaded; None for a torch without CUDA."""
    if torch.version.cuda is None:
        return None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")


class CudaMark:
    """An event: a point in the work queued on a CUDA stream.

    >>> CudaMark.done.__doc__
    'Returns whether the stream has passed it.'
    """

    def __init__(self, stream: torch.cuda.Stream, clock: _CudaClock | None = None) -> None:
        # waiting threads sleep: the cores are needed for the optimizer step
        self.event = torch.cuda.Event(blocking=True, enable_timing=clock is not None)
        self.event.record(stream)
        self.begin: CudaMark | None = None  # where the copies began that it stands behind
        self._clock = clock

    def wait(self) -> None:
        """Waits until the stream has passed it; raises if the device failed."""
        self.event.synchronize()

    def done(self) -> bool:
        """Returns whether the stream has passed it."""
        return bool(self.event.query())

    def times(self) -> tuple[int, int] | None:
        """Returns when the copies before it began and ended (`perf_counter_ns`); None if nobody
        measures, or not yet."""
        if self._clock is None or not self.done():
            return None
        end = self._clock.at(self.event)
        return (end if self.begin is None else self._clock.at(self.begin.event)), end


class _CudaClock:
    """Converts times of events to the host's clock, by one event whose time is known on both."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(stream)
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def at(self, event: torch.cuda.Event) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


def stream_gate(device: torch.device) -> Callable[[], None]:
    """Records the work that the current stream has been given. The result, when called, makes the then current stream
    wait for it.

    >>> stream_gate(torch.device("cpu"))()
    """
    if device.type != "cuda":
        return lambda: None
    mark = CudaMark(torch.cuda.current_stream(device))
    return lambda: torch.cuda.current_stream(device).wait_event(mark.event)


class DoneTicket:
    """The ticket of a transfer that ended before anybody could wait."""

    def wait(self) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """Returns True."""
        return True


def stream_ticket(device: torch.device) -> Ticket:
    """Returns a ticket for all work that the current stream has been given; on a CPU it has ended.

    >>> stream_ticket(torch.device("cpu")).done()
    True
    """
    return CudaMark(torch.cuda.current_stream(device)) if device.type == "cuda" else DoneTicket()


class CudaDriver:
    """Streams, events and copies of one GPU, for `zerokern.memory.Copies`.

    >>> CudaDriver("cpu")
    Traceback (most recent call last):
    ...
    ValueError: device=device(type='cpu'): must be a cuda device
    """

    def __init__(self, device: torch.device | str | int) -> None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(got("device", device, "a cuda device"))
        if not torch.cuda.is_available():
            raise BackendError(f"{device} was asked for, and torch {torch.__version__} finds no GPU on this machine")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._batches = runtime_library()
        self._clock: _CudaClock | None = None
        self._begun: dict[tuple[int, int], CudaMark] = {}  # by stream and by the thread that copies there

    def measure(self) -> None:
        """Makes marks record their times from now on, and when copies began."""
        if self._clock is None:
            self._clock = _CudaClock(torch.cuda.current_stream(self.device))

    def stream(self, name: str) -> torch.cuda.Stream:
        """Returns this process's stream of that name, one of `STREAMS`; it does not wait for the legacy default
        stream."""
        key = self.device.index, check_stream_name(name)
        with _MAKING:
            if key not in _CUDA_STREAMS:
                _CUDA_STREAMS[key] = torch.cuda.Stream(self.device)
            return _CUDA_STREAMS[key]

    def mark(self, stream: torch.cuda.Stream | None) -> CudaMark:
        """Records an event behind all work queued on the stream; None is torch's current stream."""
        stream = self._this_or_current(stream)
        mark = CudaMark(stream, self._clock)
        mark.begin = self._begun.pop((stream.cuda_stream, threading.get_ident()), None)
        return mark

    def follow(self, stream: torch.cuda.Stream | None, mark: CudaMark) -> None:
        """Makes later work of the stream wait for the mark."""
        self._this_or_current(stream).wait_event(mark.event)

    def copy(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queues copies (dst, src), in any order among themselves."""
        if self._clock is not None:
            self._begun[stream.cuda_stream, threading.get_ident()] = CudaMark(stream, self._clock)
        if self._batches is None:
            with torch.cuda.stream(stream):
                for dst, src in pairs:
                    dst.view(-1).copy_(src.view(-1), non_blocking=True)
            return
        dsts = array("Q", [dst.data_ptr() for dst, _ in pairs])
        srcs = array("Q", [src.data_ptr() for _, src in pairs])
        sizes = array("Q", [src.numel() * src.itemsize for _, src in pairs])
        with torch.cuda.device(self.device):
            self._batches.copy(stream.cuda_stream, dsts, srcs, sizes)

    def aside(self, name: str) -> AbstractContextManager[None]:
        """Context manager that makes this stream current; its work does not wait for the program's, or for that of
        another name."""
        return torch.cuda.stream(self.stream(name))

    def pinned(self, tensor: Tensor) -> bool:
        """Returns whether CUDA knows the memory: only then is a copy asynchronous."""
        return tensor.is_pinned()

    def _this_or_current(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream is None else stream


def check_stream_name(name: str) -> str:
    """Returns the name of a stream, or raises: names are few, so that streams are.

    >>> check_stream_name("gather")
    'gather'
    """
    if name not in STREAMS:
        raise ValueError(got("name", name, ", ".join(map(repr, STREAMS))))
    return name


def cuda_driver(device: torch.device) -> CudaDriver:
    """Returns the driver of a GPU: one object for all who ask, which goes with its last reference.

    >>> cuda_driver(torch.device("cpu"))
    Traceback (most recent call last):
    ...
    ValueError: device=device(type='cpu'): must be a cuda device
    """
    index = -1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    with _MAKING:
        driver = _CUDA_DRIVERS.get(index)
        if driver is None:
            driver = _CUDA_DRIVERS[index] = CudaDriver(device)
    return driver


def driver_of(tensor: Tensor) -> Any:
    """Returns the driver for copies between a tensor's device and host memory; None for a tensor in host memory.

    >>> driver_of(torch.ones(1)) is None
    True
    """
    return cuda_driver(tensor.device) if tensor.is_cuda else EMULATED_DRIVERS.get(tensor)
