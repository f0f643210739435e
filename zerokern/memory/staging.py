"""Tickets, and the CUDA streams and events that order copies to and from a GPU."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerokern.core.errors import BackendError, got, one_of
from zerokern.kernels.triton.backend import beside_captures, make_stream
from zerokern.memory.pairs import Pairs
from zerokern.memory.runtime import runtime_library
from zerokern.memory.span_copies import SpanCopies

__all__ = [
    "EMULATED_DRIVERS", "STREAMS", "CudaDriver", "CudaMark", "DoneTicket", "Ticket", "cuda_driver",
    "driver_of", "stream_gate",
]  # fmt: skip

STREAMS = ("down", "up", "gather", "reduce", "publish", "update", "measure")
"""The streams of torch's that a process has on a device beside the program's: for copies, to launch collectives from,
to update what forwards do not need yet, and to measure copies on, once."""
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
        with beside_captures():
            self.event.synchronize()

    def done(self) -> bool:
        """Returns whether the stream has passed it."""
        with beside_captures():
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
    """The ticket of a transfer that ended before anybody could wait.

    >>> DoneTicket().done()
    True
    """

    def wait(self) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """Returns True."""
        return True


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
        batches = runtime_library()
        self._spans = None if batches is None else SpanCopies(self, batches)
        self._clock: _CudaClock | None = None
        self._begun: dict[tuple[int, int], CudaMark] = {}  # by stream and by the thread that copies there

    def measure(self) -> None:
        """Makes marks record their times from now on, and when copies began."""
        if self._clock is None:
            self._clock = _CudaClock(torch.cuda.current_stream(self.device))

    def stream(self, name: str) -> torch.cuda.Stream:
        """Returns this process's stream of that name, one of `STREAMS`; it does not wait for the legacy default stream.

        Its priority is high: a kernel that copies is not to come behind all blocks of one that computes.
        """
        key = self.device.index, one_of("name", name, STREAMS)  # names are few, so that streams are
        with _MAKING:
            if key not in _CUDA_STREAMS:
                _CUDA_STREAMS[key] = torch.cuda.Stream(self.device, priority=-1)
            return _CUDA_STREAMS[key]

    def own_stream(self) -> torch.cuda.Stream:
        """Makes a stream that nobody else has, not even later. It stays; the current device is this one."""
        return torch.cuda.ExternalStream(make_stream(), device=self.device)

    def current(self) -> int:
        """Returns the handle of torch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Context manager that makes a stream of this device current."""
        return torch.cuda.stream(stream)

    def fence(self, stream: torch.cuda.Stream) -> CudaMark:
        """Records an event as `mark` does, and takes no time."""
        return CudaMark(stream)

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
        if self._spans is None:
            with torch.cuda.stream(stream):
                for dst, src in pairs:
                    dst.view(-1).copy_(src.view(-1), non_blocking=True)
            return
        if not pairs:
            return
        rows = pairs.rows if isinstance(pairs, Pairs) else Pairs(*zip(*pairs, strict=True)).rows
        with torch.cuda.device(self.device):
            self._spans.copy(stream, rows, to_host=pairs[0][0].is_cpu)

    def aside(self, name: str) -> AbstractContextManager[None]:
        """Context manager that makes this stream current; its work does not wait for the program's, or for that of
        another name."""
        return torch.cuda.stream(self.stream(name))

    def pinned(self, tensor: Tensor) -> bool:
        """Returns whether CUDA knows the memory: only then is a copy asynchronous."""
        return tensor.is_pinned()

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that the device has, and those that were in use at the peak so far: what this process'
        allocator has held at most, and what everything else holds now."""
        free, total = torch.cuda.mem_get_info(self.device)
        held, most = torch.cuda.memory_reserved(self.device), torch.cuda.max_memory_reserved(self.device)
        return total, total - free - held + most

    def _this_or_current(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream is None else stream


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
