"""Tickets, one for each transfer. Each ends with its own result, whether somebody waits for it or not."""

from __future__ import annotations

import errno
import platform
import struct
import threading
from ctypes import addressof, byref, c_int64, c_void_p, sizeof
from typing import TYPE_CHECKING

from zerokern.core import native
from zerokern.core.errors import IoError
from zerokern.io.advice import because

if TYPE_CHECKING:
    import torch

    from zerokern.io.engine import Engine

__all__ = ["NativeRequest", "Ticket", "Transfers", "again"]

SLICE_NS = 100_000_000  # a wait goes through Python so often, so that Ctrl-C works
SWEEP = 64
MEBI = 20  # bits. A ticket costs one unit of the credit until the next sweep, and one for each MiB that it holds
# Elsewhere the processor may load a result before the state that says it is there: a native call comes between.
LOADS_ACQUIRE = platform.machine() in ("x86_64", "i686")
CHUNK = 1024

# The first eight fields of zk_io_request; the engine itself sets the others when it takes the request.
HEAD = struct.Struct("IIiiQQQQ")
NBYTES = sizeof(native.IoRequest)
STATE, ERROR = (getattr(native.IoRequest, name).offset // 4 for name in ("state", "error"))
DONE, IDLE, READ = native.IO_DONE, native.IO_IDLE, native.IO_READ

FULL = "or give the store a budget, which is allocated when the store opens"


def again(says: str, error: IoError) -> IoError:
    """Returns the same error with another message."""
    return IoError(says, path=error.path, offset=error.offset, nbytes=error.nbytes, errno=error.errno, key=error.key)


class NativeRequest:
    """One native request. `chunk` and `words` are the memory of its chunk, as bytes and as 32-bit words: reading and
    writing through them takes a fifth of the time that ctypes fields take."""

    __slots__ = ("address", "chunk", "in_table", "request", "retired", "start", "state", "waiters", "words")

    def __init__(self, chunk: memoryview, words: memoryview, request: native.IoRequest, index: int, table: int) -> None:
        self.chunk, self.words, self.request = chunk, words, request
        self.address = addressof(request)
        self.in_table = table + index * sizeof(c_void_p)  # where its address is written, as zk_io_submit wants it
        self.start = index * NBYTES
        self.state = index * NBYTES // 4 + STATE
        self.waiters = 0  # threads inside zk_io_wait: until they have left, the slot is not used again
        self.retired = False

    @property
    def error(self) -> int:
        return self.words[self.state - STATE + ERROR]


class Requests:
    """A pool of native requests at fixed addresses, so that a ticket allocates nothing native. It grows by CHUNK."""

    __slots__ = ("_chunks", "free")

    def __init__(self) -> None:
        self._chunks: list[tuple[object, object]] = []
        self.free: list[NativeRequest] = []

    def take(self) -> NativeRequest:
        """Returns a request whose state is IO_IDLE."""
        if not self.free:
            self._grow()
        slot = self.free.pop()
        slot.words[slot.state] = native.IO_IDLE
        return slot

    def give(self, slot: NativeRequest) -> None:
        """Takes back a request that has ended, now or when the last thread that waits for it has noticed."""
        if slot.waiters:
            slot.retired = True
        else:
            self.free.append(slot)

    def leave(self, slot: NativeRequest) -> None:
        """Records that a thread that waited for the request has noticed its end."""
        slot.waiters -= 1
        if slot.retired and not slot.waiters:
            slot.retired = False
            self.free.append(slot)

    def _grow(self) -> None:
        requests = (native.IoRequest * CHUNK)()
        table = (c_void_p * CHUNK)(*(addressof(request) for request in requests))
        chunk = memoryview(requests).cast("B")
        words = chunk.cast("i")
        self._chunks.append((requests, table))
        self.free += [NativeRequest(chunk, words, requests[i], i, addressof(table)) for i in reversed(range(CHUNK))]


class Ticket:
    """A pending transfer. It keeps its tensor alive until it has ended; what becomes of it is told by ``wait()``.

    >>> import tempfile, torch
    >>> from zerokern.io import Store
    >>> with tempfile.TemporaryDirectory() as folder, zk.io.Store(folder, depth=4, block=1 << 20) as store:
    ...     ticket = store.put("x", torch.arange(5))
    ...     ticket.wait()
    ...     ticket.done(), ticket.nbytes
    (True, 40)
    """

    __slots__ = (
        "__weakref__", "_crc", "_failure", "_slot", "_source", "_tensor", "_transfers",
        "file", "key", "nbytes", "offset", "op",
    )  # fmt: skip

    def __init__(
        self, transfers: Transfers, slot: NativeRequest | None, op: int, key: str, nbytes: int, file: int, offset: int
    ) -> None:
        self._transfers, self._slot = transfers, slot
        self.op, self.key, self.nbytes, self.file, self.offset = op, key, nbytes, file, offset
        self._tensor: torch.Tensor | None = None
        self._source: Ticket | None = None  # of a get: the put whose bytes it reads
        self._crc: int | None = None  # of a get: what the bytes must give
        self._failure: IoError | None = None

    def done(self) -> bool:
        """Returns whether the transfer has ended, successfully or not. ``wait()`` says which."""
        slot = self._slot
        return slot is None or slot.words[slot.state] == DONE or self._slot is None

    def wait(self) -> None:
        """Waits until the transfer has ended; raises ``IoError`` if it failed, each time."""
        if self._slot is not None:
            self._transfers.finish(self)
        if self._crc is not None and self._failure is None:
            self._verify()
        if self._failure is not None:
            self._transfers.untold.pop(self, None)
            raise self._failure.with_traceback(None)

    def await_ended(self) -> None:
        """Waits with the lock of the transfers held; raises nothing."""
        self._transfers.await_ticket(self)

    def _verify(self) -> None:
        tensor, crc = self._tensor, self._crc
        if tensor is None or crc is None:  # another thread has just done it
            return
        found = native.crc32c(tensor.data_ptr(), self.nbytes)
        if found != crc:
            says = f"the bytes read have CRC32C {found:08x}, those that were put had {crc:08x}"
            advice = "Something has overwritten the file, or the device returned other bytes; put the key again"
            self._failure = self.failure(errno.EBADMSG, f"{says}. {advice}")
        self._crc = self._tensor = None

    def failure(self, number: int, says: str = "", offset: int | None = None, nbytes: int | None = None) -> IoError:
        """Returns the error of this transfer; offset and nbytes are those of the part that failed."""
        path = self._transfers.paths.get(self.file, "")
        offset = self.offset if offset is None else offset
        nbytes = self.nbytes if nbytes is None else nbytes
        why = says or because(number) + (f", {FULL}" if number in (errno.ENOSPC, errno.EDQUOT) else "")
        what = "get" if self.op == READ else "put"
        return IoError(
            f"{what} of {self.key!r} ({self.nbytes} bytes) failed in {path} at offset {offset}, {nbytes} bytes: {why}",
            path=path, offset=offset, nbytes=nbytes, errno=number, key=self.key,
        )  # fmt: skip


class Transfers:
    """The tickets of one engine that have not ended. All but finish() is called with `lock` held."""

    def __init__(self, engine: Engine, paths: dict[int, str]) -> None:
        self.lock = threading.RLock()
        self.paths = paths  # by the engine's number of a file
        self.inherited = False
        self.pending: dict[NativeRequest, Ticket] = {}
        self.untold: dict[Ticket, None] = {}  # failures that no wait() has raised
        self.requests = Requests()
        self._handle = engine.handle
        self._submit = native.library().zk_io_submit
        self._wait = native.library().zk_io_wait
        self._bad = c_int64()
        self._bad_at = byref(self._bad)
        self._credit = SWEEP

    def start(self, ticket: Ticket, slot: NativeRequest, address: int, flags: int, after: int) -> None:
        """Queues a request; the ticket is pending from here on. `after`: address of a request that must have ended."""
        HEAD.pack_into(
            slot.chunk, slot.start, ticket.op, flags, ticket.file, IDLE, ticket.offset, address, ticket.nbytes, after
        )
        self.pending[slot] = ticket
        refusal = self._submit(self._handle, slot.in_table, 1, self._bad_at)
        if refusal:
            del self.pending[slot]
            ticket._slot = None
            ticket._failure = ticket.failure(errno.ECANCELED)
            self.requests.give(slot)
            native.check(refusal, context=f"the disk engine refused a transfer of {ticket.key!r}")
        self._credit -= 1 + (ticket.nbytes >> MEBI)
        if self._credit < 0:
            self.sweep()

    def sweep(self) -> None:
        """Settles tickets that have ended, so that those that nobody kept do not pile up."""
        for slot, ticket in self.pending.copy().items():
            if slot.words[slot.state] == DONE:
                self.settle(ticket)
        self._credit = max(SWEEP, len(self.pending))

    def settle(self, ticket: Ticket) -> None:
        """Takes over the result of a request that has ended, or that an interrupt kept from beginning."""
        slot = ticket._slot
        if slot is None:
            return
        number = errno.ECANCELED
        if slot.words[slot.state] == DONE:
            if not LOADS_ACQUIRE:
                self._wait(slot.address, 0)
            number = slot.error
        if number:
            request = slot.request
            where = (request.error_at, request.error_nbytes) if number != errno.ECANCELED else (None, None)
            ticket._failure = ticket.failure(number, "", *where)
        source, ticket._source = ticket._source, None
        if source is not None and not number:
            self.await_ticket(source)  # it has ended: the engine kept the order
            if source._failure is not None:
                says = f"what it should read was never written: {source._failure}"
                ticket._failure = ticket.failure(source._failure.errno, says)
        if ticket._failure is not None:
            self.untold[ticket] = None
        if ticket._crc is None or ticket._failure is not None:
            ticket._tensor = None
        ticket._slot = None
        self.pending.pop(slot, None)
        self.requests.give(slot)

    def pending_slot(self, ticket: Ticket) -> NativeRequest | None:
        """Returns the slot of a ticket that has not ended."""
        slot = ticket._slot
        return slot if slot is not None and slot.words[slot.state] != DONE else None

    def await_ticket(self, ticket: Ticket) -> None:
        """Waits for a ticket with the lock held, so that nothing comes between; raises nothing."""
        slot = ticket._slot
        if slot is None:
            return
        while slot.words[slot.state] not in (DONE, IDLE):
            self._wait(slot.address, SLICE_NS)
        self.settle(ticket)

    def drain(self) -> None:
        """Waits for everything that is pending."""
        for ticket in list(self.pending.values()):
            self.await_ticket(ticket)

    def raise_untold(self) -> None:
        """Raises the first failure that no wait() has told, with the keys of the others."""
        failures = [ticket._failure for ticket in list(self.untold) if ticket._failure is not None]
        self.untold.clear()
        if not failures:
            return
        first = failures[0]
        if failures[1:]:
            keys = ", ".join(repr(one.key) for one in failures[1:9]) + (", …" if failures[9:] else "")
            says = f"{first}\n{len(failures) - 1} more transfers failed that nobody waited for: {keys}"
            first = again(says, first)
        raise first.with_traceback(None)

    def let_go(self) -> None:
        """Marks tickets as never ending here, in a forked child; the lock may be held by a thread that is not here."""
        self.inherited = True
        self.lock = threading.RLock()

    def finish(self, ticket: Ticket) -> None:
        """Waits without the lock, then settles."""
        slot = ticket._slot
        if slot is None:
            return
        if self.inherited:
            says = "this process was forked while it was pending; only the parent is told its end"
            raise ticket.failure(errno.ECHILD, says)
        if slot.words[slot.state] != DONE:
            with self.lock:
                if ticket._slot is not slot:  # another thread has settled it
                    return
                slot.waiters += 1
            try:
                while slot.words[slot.state] not in (DONE, IDLE):
                    self._wait(slot.address, SLICE_NS)
            finally:  # also on Ctrl-C: the transfer goes on then
                with self.lock:
                    self.requests.leave(slot)
        with self.lock:
            self.settle(ticket)
