"""Memory of native requests: slots at addresses that stay, used again, so that a ticket allocates nothing native."""

from __future__ import annotations

import struct
from ctypes import addressof, c_void_p, sizeof

from zerokern.core import native

__all__ = ["NativeRequest", "Slots"]

CHUNK = 1024

# The first eight fields of zk_io_request; the engine itself sets the others when it takes the request.
HEAD = struct.Struct("IIiiQQQQ")
NBYTES = sizeof(native.IoRequest)
STATE, ERROR = (getattr(native.IoRequest, name).offset // 4 for name in ("state", "error"))


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


class Slots:
    """Slots that are free; more are made, CHUNK at a time, when there are none."""

    __slots__ = ("_chunks", "free")

    def __init__(self) -> None:
        self._chunks: list[tuple[object, object]] = []
        self.free: list[NativeRequest] = []

    def take(self) -> NativeRequest:
        """A slot whose state is IO_IDLE."""
        if not self.free:
            self._grow()
        slot = self.free.pop()
        slot.words[slot.state] = native.IO_IDLE
        return slot

    def give(self, slot: NativeRequest) -> None:
        """Takes back a slot whose request has ended, now or when the last thread that waits on it has noticed."""
        if slot.waiters:
            slot.retired = True
        else:
            self.free.append(slot)

    def leave(self, slot: NativeRequest) -> None:
        """A thread that waited on the slot has noticed."""
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
