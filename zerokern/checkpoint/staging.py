"""The slots that the bytes of a checkpoint pass through between memory and disk, and the engine that moves them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from zerokern.checkpoint.index import BLOCK_NBYTES
from zerokern.core import native
from zerokern.core.errors import IoError, say_once
from zerokern.io.advice import failed
from zerokern.io.engine import Engine, Faults
from zerokern.io.files import go_direct
from zerokern.io.probing import START, cached
from zerokern.io.ticket import Ticket, Transfers
from zerokern.memory import Arena, Lease

__all__ = ["BLOCK", "SLOTS", "Outgoing", "Span", "Staging", "address_of", "copy", "crc32c", "put"]

BLOCK = BLOCK_NBYTES  # bytes under one checksum, and of one request
# In flight: 8 MiB keep a disk busy and stay in the processor's cache, where they are copied and summed: 32 MiB took 1.3
# times as long. They are all the memory that saving and loading take.
SLOTS = 8

Take = Callable[[Tensor, int], object]  # given bytes of a span, and where in the span they begin
Span = tuple[int, int, Take]  # offset and nbytes in a file

READ, WRITE, PADDED = native.IO_READ, native.IO_WRITE, native.IO_PADDED


class Staging:
    """One engine and its slots. Depth and block are what an earlier probe of this disk found, or usual ones."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = SLOTS,
        depth: int | None = None,
        block: int | None = None,
        engine: str = "auto",
        faults: Faults | None = None,
    ) -> None:
        self.offset_align = 1  # what the files ask for
        found = cached(folder) if depth is None or block is None else None
        usual_depth, usual_block = (found.depth, found.block) if found is not None else START
        self.engine = Engine(engine, depth=depth or usual_depth, block=block or usual_block, faults=faults)
        try:
            self.arena = Arena(slots * BLOCK)
            self.slots: list[Lease] = [self.arena.lease(BLOCK, f"saving slot {i}") for i in range(slots)]
            self.bytes: list[Tensor] = [slot.tensor() for slot in self.slots]
            self.engine.register(self.arena)
            self.transfers = Transfers(self.engine, {})
        except BaseException:
            self.engine.close()
            raise

    def enter(self, fd: int, path: Path) -> int:
        """The engine's number of an open file, which bypasses the page cache where the file system lets it."""
        memory_align, offset_align = go_direct(fd, path.parent)
        if offset_align == 1:
            say_once(
                "zerokern.io", f"{path.parent}: this file system has no O_DIRECT; checkpoints go through the page cache"
            )
        self.offset_align = max(self.offset_align, offset_align)
        number = self.engine.file(fd, memory_align, offset_align)
        self.transfers.paths[number] = str(path)
        return number

    def leave(self, number: int) -> None:
        """Lets go of a file; waits for what is pending on it."""
        self.engine.forget_file(number)
        self.transfers.paths.pop(number, None)

    def start(self, op: int, slot: int, number: int, offset: int, nbytes: int, inside: int = 0) -> Ticket:
        """Moves bytes of a slot, from `inside` on, to or from the file. An odd end is padded within the slot."""
        transfers = self.transfers
        request = transfers.requests.take()
        ticket = Ticket(transfers, request, op, transfers.paths[number], nbytes, number, offset)
        with transfers.lock:
            transfers.start(ticket, request, self.slots[slot].ptr + inside, PADDED, 0)
        return ticket

    def drain(self) -> None:
        """Waits until nothing moves in the slots, however it ended."""
        with self.transfers.lock:
            self.transfers.drain()
            self.transfers.untold.clear()

    def close(self) -> None:
        """Ends the engine, then gives the memory back; the second time it does nothing."""
        if self.engine.closed:
            return
        self.drain()
        self.engine.close()
        self.bytes.clear()
        for slot in self.slots:
            slot.release()
        self.arena.close()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outgoing:
    """A file on its way out: whoever writes fills one slot while those before it are being written."""

    def __init__(self, staging: Staging, fd: int, path: Path) -> None:
        self.staging, self.path = staging, path
        self._number = staging.enter(fd, path)
        self._tickets: list[Ticket | None] = [None] * len(staging.slots)
        self._slot = 0

    @property
    def address(self) -> int:
        """Of the slot that is to be filled."""
        return self.staging.slots[self._slot].ptr

    @property
    def bytes(self) -> Tensor:
        """Its memory."""
        return self.staging.bytes[self._slot]

    def send(self, offset: int, nbytes: int, inside: int = 0) -> None:
        """Sends bytes of the slot, from `inside` on, to their place in the file; waits until the next slot is free."""
        self._tickets[self._slot] = self.staging.start(WRITE, self._slot, self._number, offset, nbytes, inside)
        self._slot = (self._slot + 1) % len(self._tickets)
        self._await(self._slot)

    def finish(self) -> None:
        """Returns once all of it is written; raises what could not be."""
        for slot in range(len(self._tickets)):
            self._await(slot)

    def close(self) -> None:
        """Lets go of the file; waits for what is pending."""
        self.staging.drain()
        self.staging.leave(self._number)

    def _await(self, slot: int) -> None:
        ticket, self._tickets[slot] = self._tickets[slot], None
        if ticket is not None:
            try:
                ticket.wait()
            except IoError as error:
                raise failed("Writing", self.path, error) from error


def address_of(data: bytes) -> int:
    """Where the bytes lie, for as long as the object lives."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def crc32c(address: int, nbytes: int, before: int = 0) -> int:
    """Of bytes in memory, by the processor's own instruction where it has one; going on from those before."""
    return int(native.library().zk_crc32c(before, address, nbytes))


def copy(target: int, source: int, nbytes: int) -> None:
    """Copies bytes between addresses, in this thread alone and without the interpreter's lock: training goes on."""
    ctypes.memmove(target, source, nbytes)


def put(target: Tensor, source: Tensor) -> None:
    """Copies elements into as many in host memory, 1-D; by torch, whose threads would disturb training, if it must."""
    plain = source.is_contiguous() and not (source.is_conj() or source.is_neg())
    alike = target.dtype is source.dtype and target.numel() == source.numel()
    if plain and alike and source.device.type == "cpu":
        copy(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)
