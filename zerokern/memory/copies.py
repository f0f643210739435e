"""Copies between a device and host memory: one stream for each direction, and a ticket for each call.

All parts of a process that copy to and from a device share its two streams, each with `Copies` of its own. A copy keeps
its tensors until it has ended, so their memory is not reused and nothing calls `record_stream`. No copy changes a
dtype: casts run on the device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels.triton.backend import capturing
from zerokern.memory.pairs import Pairs
from zerokern.memory.staging import Ticket

__all__ = ["Copies", "Copy", "Driver"]

_IN_GRAPH = (
    "a copy between a device and host memory cannot go into a CUDA graph: the host waits for copies, and replays do "
    'not tell it of any; capture where parameters, gradients and activations stay on the device (tier="device")'
)


class Driver(Protocol):
    """What copies need of a device. `zerokern.memory.staging.CudaDriver` is CUDA; tests emulate
    streams with threads."""

    device: torch.device

    def stream(self, name: str) -> Any:
        """Returns the device's stream of this name, one of `staging.STREAMS`; the same one each time."""

    def mark(self, stream: Any | None) -> Ticket:
        """Records an event behind all work queued on the stream; None is the caller's current stream."""

    def follow(self, stream: Any | None, mark: Ticket) -> None:
        """Makes later work of the stream wait for the mark."""

    def copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queues copies (dst, src), in any order among themselves. The host does not wait."""

    def aside(self, name: str) -> AbstractContextManager[None]:
        """Context manager that makes the stream of this name current; its work does not wait for the program's, or for
        that of another name."""

    def pinned(self, tensor: Tensor) -> bool:
        """Returns whether copies to and from this host tensor run asynchronously."""

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that the device has, and those that were in use at the peak so far, by all who use it."""


class Copy:
    """The ticket of copies that were requested together.

    >>> from zerokern.memory import Copies
    >>> Copies.to_host.__annotations__["return"]
    'Copy'
    """

    def __init__(self, driver: Driver, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._driver, self._stream = driver, stream
        self._pairs: Sequence[tuple[Tensor, Tensor]] = pairs
        self._mark: Ticket | None = None
        self._failure: Exception | None = None
        self._ended = self._reported = False

    def done(self) -> bool:
        """Returns whether the copies have ended, successfully or not; ``wait()`` says which."""
        if self._ended or self._mark is None:
            return self._ended
        try:
            return self._mark.done()
        except Exception:  # a device that has failed: wait() tells
            return True

    def wait(self) -> None:
        """Waits on the host until the copies have ended; raises their error, each time."""
        self._finish()
        if self._failure is not None:
            self._reported = True
            raise self._failure

    def times(self) -> tuple[int, int] | None:
        """Returns when the copies began and ended (`perf_counter_ns`), if the device's marks know that."""
        known = getattr(self._mark, "times", None)
        return None if known is None else known()

    def references_to(self, memory: Tensor) -> int:
        """Returns how many tensors over the same memory the copies keep, until they have ended."""
        storage = memory.untyped_storage()._cdata
        return sum(one.untyped_storage()._cdata == storage for pair in self._pairs for one in pair)

    def gate(self) -> None:
        """Makes later work of the current stream wait for the copies; the host does not wait."""
        if not self._ended:
            self._driver.follow(None, self._marked())

    def _marked(self) -> Ticket:
        """Returns the mark behind the copies. If an interrupt came before it was recorded, a later one serves as
        well."""
        if self._mark is None:
            self._mark = self._driver.mark(self._stream)
        return self._mark

    def _finish(self) -> None:
        """Waits, keeps the result, and releases the tensors."""
        if self._ended:
            return
        try:
            self._marked().wait()
        except Exception as error:
            self._failure = error
        self._ended = True
        self._pairs = ()


class Copies:
    """Copies on the two copy streams of a device, and which of its own are in flight there.

    ``ready``: a ticket after which the tensors may be read or written; by default the point that the current stream has
    reached. ``after``: one more such ticket, as `flowing` passes it; for a ticket of another engine the host waits.
    Methods may be called from any thread.

    >>> class NoDevice:
    ...     device = torch.device("cuda", 0)
    ...     def stream(self, name):
    ...         return object()
    >>> copies = Copies(NoDevice())
    >>> copies.to_host(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    TypeError: copy 0 goes from torch.float32 to torch.bfloat16; allowed: one dtype (cast on the device)
    >>> copies.close()
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._out, self._in = driver.stream("down"), driver.stream("up")
        self._pending: deque[Copy] = deque()
        self._unreported: list[Copy] = []  # failed, and let go of before anybody had asked
        self._lock = threading.RLock()
        self._closed = False

    def here(self, keeps: Sequence[Tensor] = ()) -> Copy:
        """Returns a ticket for all work that the current stream has been given so far. `keeps`: what that work uses, so
        that its memory is nobody else's before it has ended."""
        copy = Copy(self.driver, None, [(one, one) for one in keeps])
        copy._mark = self.driver.mark(None)
        if keeps:
            with self._lock:
                self._pending.append(copy)
        return copy

    def to_host(
        self,
        src: Tensor | Sequence[Tensor],
        dst: Tensor | Sequence[Tensor],
        *,
        ready: Ticket | None = None,
        after: Ticket | None = None,
        checked: bool = False,
    ) -> Copy:
        """Copies device tensors to pinned host tensors of the same dtypes and lengths, as one batch.

        The copies of a batch run in any order, so no two of them may touch the same memory. `checked`: the arguments
        were checked in an earlier call and are unchanged.
        """
        return self._submit(self._out, _pairs(src, dst), ready, after, checked)

    def aside(self, src: Tensor, dst: Tensor, *, ready: Ticket | None = None) -> Copy:
        """Copies a few bytes to the host as `to_host` does, but not behind the copies that were requested before."""
        return self._submit(self.driver.stream("measure"), Pairs([dst], [src]), ready, None, True)

    def to_device(
        self,
        src: Tensor | Sequence[Tensor],
        dst: Tensor | Sequence[Tensor],
        *,
        ready: Ticket | None = None,
        after: Ticket | None = None,
        checked: bool = False,
    ) -> Copy:
        """Copies pinned host tensors to device tensors of the same dtypes and lengths, as one batch, as `to_host`."""
        return self._submit(self._in, _pairs(src, dst), ready, after, checked)

    def close(self) -> None:
        """Waits for all copies; raises the first error that was not reported."""
        with self._lock:
            self._closed = True
            while self._pending:
                self._retire(self._pending[0])
            unreported = [copy for copy in self._unreported if not copy._reported]
            self._unreported.clear()
        if unreported:
            unreported[0].wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody could handle an error here
            self.close()

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(
        self,
        stream: Any,
        pairs: Pairs,
        ready: Ticket | None,
        after: Ticket | None,
        checked: bool,
    ) -> Copy:
        if capturing(self.driver.device):
            raise StateError(_IN_GRAPH)
        leaves = stream is self._out
        for ticket in (ready, after):
            if ticket is not None and not isinstance(ticket, Copy):
                ticket.wait()
        # Behind the waits: until then another thread may give a tensor other memory.
        check = None if checked else functools.partial(self._checked_memory, pairs, leaves)
        if not pairs.read(self.driver.device, leaves, check) and not checked:
            self._check_all(pairs, leaves)
        pairs = pairs.with_bytes()
        with self._lock:
            if self._closed:
                raise StateError("these copies are closed; make others")
            for ended in [pending for pending in self._pending if pending.done()]:
                self._retire(ended)  # a slow copy in one direction does not keep those of the other
            before = [ticket for ticket in (ready, after) if isinstance(ticket, Copy)]
            if ready is None:
                before.append(self.here())
            copy = Copy(self.driver, stream, pairs)
            self._pending.append(copy)  # first: an interrupt from here on finds it there, with its tensors
            try:
                for ticket in before:
                    if not ticket._ended:
                        self.driver.follow(stream, ticket._marked())
                self.driver.copy(stream, pairs)
            finally:
                copy._marked()
            return copy

    def _checked_memory(self, pairs: Pairs, leaves: bool, place: int) -> tuple[int, int]:
        """Returns the pinned memory of the host side of a pair; raises where the pair cannot be copied."""
        self._check(place, *pairs[place], leaves)
        there = (pairs.targets if leaves else pairs.sources)[place]
        self._check_pinned(place, there)
        memory = there.untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()

    def _check_all(self, pairs: Pairs, leaves: bool) -> None:
        """Raises for the first pair that cannot be copied, where `Pairs.read` cannot ask."""
        host = torch.device("cpu")
        source, target = (self.driver.device, host) if leaves else (host, self.driver.device)
        begin = end = 0  # of the host memory that was found to be pinned last
        for i, (dst, src) in enumerate(pairs):
            plain = (
                dst.dtype is src.dtype
                and dst.numel() == src.numel()
                and src.device == source
                and dst.device == target
                and _is_plain(src)
                and _is_plain(dst)
            )
            if not plain:
                self._check(i, dst, src, leaves)
            there = dst if leaves else src
            if there.numel() and not begin <= there.data_ptr() < end:
                self._check_pinned(i, there)
                memory = there.untyped_storage()
                begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()

    def _check(self, i: int, dst: Tensor, src: Tensor, leaves: bool) -> None:
        if dst.dtype != src.dtype:
            raise TypeError(f"copy {i} goes from {src.dtype} to {dst.dtype}; allowed: one dtype (cast on the device)")
        if dst.numel() != src.numel():
            raise ValueError(
                f"copy {i} goes from {src.numel()} elements to {dst.numel()}; allowed: as many on both sides"
            )
        host = torch.device("cpu")
        source, target = (self.driver.device, host) if leaves else (host, self.driver.device)
        for name, tensor, device in (("source", src, source), ("destination", dst, target)):
            if tensor.device != device:
                raise ValueError(f"the {name} of copy {i} is on {tensor.device}; allowed: {device}")
            if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
                raise ValueError(
                    f"the {name} of copy {i} is sparse, or a lazily negated or conjugated view; allowed: tensors whose "
                    "memory holds what they mean (call .to_dense(), .resolve_neg() or .resolve_conj())"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"the {name} of copy {i} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; allowed: "
                    "contiguous tensors"
                )

    def _check_pinned(self, i: int, host: Tensor) -> None:
        if not self.driver.pinned(host):
            raise ValueError(
                f"the host side of copy {i} is not pinned; allowed: leases of a zerokern.memory.Arena taken while CUDA "
                "is in use, or tensors made with pin_memory=True"
            )

    def _retire(self, copy: Copy) -> None:
        copy._finish()
        if copy._failure is not None and not copy._reported:
            self._unreported.append(copy)
        self._pending.remove(copy)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds what it means, element by element."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def _pairs(src: Tensor | Sequence[Tensor], dst: Tensor | Sequence[Tensor]) -> Pairs:
    sources = (src,) if isinstance(src, Tensor) else tuple(src)
    targets = (dst,) if isinstance(dst, Tensor) else tuple(dst)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources for {len(targets)} destinations; allowed: as many of each")
    return Pairs(targets, sources)
