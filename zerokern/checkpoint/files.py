"""Data files of a checkpoint, written and read through slots of memory, with a checksum for each block.

A file is written once, from beginning to end. After the data comes a table with the CRC32C of each block of 1 MiB, as
32-bit little-endian numbers. The index holds the table's own checksum, so every byte is checked.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.folder import OpenFiles
from zerokern.checkpoint.index import BLOCK_NBYTES, FileRow, file_error
from zerokern.core import native
from zerokern.core.errors import IoError
from zerokern.core.native import crc32c
from zerokern.io.advice import failed, failing
from zerokern.io.engine import Engine, Faults
from zerokern.io.files import register_file, reserve
from zerokern.io.probing import START, cached
from zerokern.io.ticket import Ticket, Transfers
from zerokern.memory import Arena, Ring, Slot

__all__ = [
    "BLOCK", "SLOTS", "FileReader", "FileWriter", "PartsWriter", "SlotWriter", "Slots", "Span", "copy_into",
]  # fmt: skip

BLOCK = BLOCK_NBYTES  # bytes under one checksum, and of one request
# 8 MiB in flight keep a disk busy and stay in the processor's cache, where they are copied and summed: 32 MiB took 1.3
# times as long. Two more, so that as many are in flight while one is filled or emptied: a save took 1.1 times as long
# without. They are all the memory that saving and loading take.
SLOTS = 10
CACHED = 256 << 10  # bytes that are copied, then summed while they are in the processor's cache
STEP = 64 * BLOCK  # bytes between two reports of progress
MODE = 0o666  # less the umask: a checkpoint is the user's document, not private swap
RESTORE = "Restore the file from a copy, or load another checkpoint"

Take = Callable[[Tensor, int], object]  # given bytes of a span, and where in the span they begin
Span = tuple[int, int, Take | int]  # offset and nbytes in a file; who takes them, or the address that they go to


class Slots(AbstractContextManager["Slots"]):
    """Memory slots and the I/O engine that moves them. Depth and block size come from a probe of this disk."""

    def __init__(
        self,
        folder: Path,
        *,
        depth: int | None = None,
        block: int | None = None,
        engine: str = "auto",
        faults: Faults | None = None,
    ) -> None:
        self.offset_align = 1  # what the files ask for
        probe = cached(folder) if depth is None or block is None else None
        usual_depth, usual_block = (probe.depth, probe.block) if probe is not None else START
        self.engine = Engine(engine, depth=depth or usual_depth, block=block or usual_block, faults=faults)
        try:
            self.arena = Arena(SLOTS * BLOCK)
            self.ring = Ring(self.arena, SLOTS, BLOCK, "saving")
            self.bytes: list[Tensor] = [slot.lease.tensor() for slot in self.ring.slots]
            self.engine.register(self.arena)
            self.transfers = Transfers(self.engine, {})
        except BaseException:
            self.engine.close()
            raise

    def register(self, fd: int, path: Path) -> int:
        """Returns the engine's number for an open file, which bypasses the page cache if the file
        system allows that."""
        number, offset_align = register_file(self.engine, fd, path.parent, "checkpoints")
        self.offset_align = max(self.offset_align, offset_align)
        self.transfers.paths[number] = str(path)
        return number

    def forget(self, number: int) -> None:
        """Unregisters a file, after waiting for what is pending in the slots."""
        self.drain()
        self.engine.forget_file(number)
        self.transfers.paths.pop(number, None)

    def start(self, op: int, slot: int, number: int, offset: int, nbytes: int, inside: int = 0) -> Ticket:
        """Starts moving bytes of a slot, from `inside` on, to or from the file. An odd length is padded within the
        slot."""
        transfers = self.transfers
        request = transfers.requests.take()
        ticket = Ticket(transfers, request, op, transfers.paths[number], nbytes, number, offset)
        with transfers.lock:
            transfers.start(ticket, request, self.address(slot) + inside, native.IO_PADDED, 0)
        return ticket

    def address(self, slot: int) -> int:
        """Returns the address of a slot's memory."""
        return self.ring.slots[slot].lease.ptr

    def drain(self) -> None:
        """Waits until nothing moves in the slots; ignores errors."""
        with self.transfers.lock:
            self.transfers.drain()
            self.transfers.untold.clear()
        for slot in self.ring.slots:
            slot.drained = None

    def close(self) -> None:
        """Closes the engine, then frees the memory; a second call does nothing."""
        if self.engine.closed:
            return
        self.drain()
        self.engine.close()
        self.bytes.clear()
        self.ring.close()
        self.arena.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class SlotWriter(AbstractContextManager[Any]):
    """Writes into an open file. One slot is filled while earlier ones are written."""

    def __init__(self, slots: Slots, fd: int, path: Path) -> None:
        self.slots, self.path = slots, path
        self._number = slots.register(fd, path)
        self._slot = 0

    @property
    def address(self) -> int:
        """The address of the slot that is to be filled."""
        return self.slots.address(self._slot)

    @property
    def bytes(self) -> Tensor:
        """The memory of the slot that is to be filled."""
        return self.slots.bytes[self._slot]

    def send(self, offset: int, nbytes: int, inside: int = 0) -> None:
        """Starts to write bytes of the slot, from `inside` on, at `offset`; waits until the next slot is free."""
        ring = self.slots.ring.slots
        ring[self._slot].drained = self.slots.start(native.IO_WRITE, self._slot, self._number, offset, nbytes, inside)
        self._slot = (self._slot + 1) % len(ring)
        self._wait(ring[self._slot])

    def wait(self) -> None:
        """Waits until everything is written; raises the first error."""
        for slot in self.slots.ring.slots:
            self._wait(slot)

    def _wait(self, slot: Slot) -> None:
        ticket, slot.drained = slot.drained, None
        if ticket is not None:
            with failing("Writing", self.path):
                ticket.wait()


class FileWriter(SlotWriter):
    """Writes a new data file by appending. `engine`: settings of `Slots`.

    `expected`: the length to reserve on the file system. Beyond it the file grows write by write, one at a time.
    """

    def __init__(self, path: Path, *, expected: int = 0, **engine: object) -> None:
        self.path = path
        self.nbytes = 0  # appended so far
        self._sums = array("I")
        self._sum = 0  # of the block under way
        self._written = 0
        self._filled = 0  # bytes so far of the slot that is being filled
        self._open = ExitStack()
        self._fd = -1
        with failing("Making", path, 0, expected):
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(path, flags, MODE)
                self._open.callback(os.close, self._fd)
                if expected:
                    reserve(self._fd, expected)
                slots = self._open.enter_context(Slots(path.parent, **engine))  # type: ignore[arg-type]
                super().__init__(slots, self._fd, path)
            except BaseException:
                self.abandon()
                raise

    def append(self, data: bytes | Tensor, report: Callable[[int], object] = int) -> int:
        """Appends the bytes of a tensor of any device and strides, in row-major order; returns their offset.

        The tensor may change as soon as this returns. `report` is called with the number of bytes taken, several times.
        """
        if self._fd < 0:
            raise ValueError(f"{self.path} is finished or abandoned: nothing can be added to it")
        begin = self.nbytes
        if isinstance(data, bytes):
            self._copy(_address_of(data), len(data))
            self.nbytes += len(data)
            return begin
        for part in (part for piece in _pieces(data, BLOCK) for part in piece.split(STEP)):
            if part.device.type == "cpu":
                self._copy(part.data_ptr(), part.numel())
            else:
                self._copy_from_device(part)
            self.nbytes += part.numel()
            report(part.numel())
        return begin

    def align(self, nbytes: int) -> None:
        """Pads the file with zeros to a multiple of nbytes."""
        self.append(bytes(-self.nbytes % nbytes))

    def finish(self) -> FileRow:
        """Writes the remaining bytes and the table of checksums, and syncs the file."""
        table = self.nbytes
        if self._filled:
            self._end_block()
        if sys.byteorder == "big":
            self._sums.byteswap()
        sums = self._sums.tobytes()
        address = _address_of(sums)
        row = FileRow(self.path.name, table + len(sums), table, crc32c(address, len(sums)))
        self._copy(address, len(sums), checked=False)
        self._flush()
        self.wait()
        with failing("Finishing", self.path, 0, row.nbytes):
            os.ftruncate(self._fd, row.nbytes)
            os.fsync(self._fd)
        self._close()
        return row

    def abandon(self) -> None:
        """Removes the file, unless it is finished."""
        if self._fd >= 0:
            self._close()
            self.path.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _copy(self, address: int, nbytes: int, checked: bool = True) -> None:
        while nbytes:
            part = min(nbytes, CACHED, BLOCK - self._filled)
            copy_bytes(self.address + self._filled, address, part)
            self._advance(part, checked)
            address += part
            nbytes -= part

    def _copy_from_device(self, piece: Tensor) -> None:
        """Copies one slot at a time, because each copy waits for the device."""
        while piece.numel():
            part = min(piece.numel(), BLOCK - self._filled)
            self.bytes[self._filled : self._filled + part].copy_(piece[:part])
            self._advance(part, True)
            piece = piece[part:]

    def _advance(self, nbytes: int, checked: bool) -> None:
        """Adds nbytes of the slot to the block's checksum, and writes the slot when it is full."""
        if checked:
            self._sum = crc32c(self.address + self._filled, nbytes, self._sum)
        self._filled += nbytes
        if self._filled == BLOCK:
            if checked:
                self._end_block()
            self._flush()

    def _end_block(self) -> None:
        self._sums.append(self._sum)
        self._sum = 0

    def _flush(self) -> None:
        """Starts to write the slot, and waits until the next one is free."""
        if not self._filled:
            return
        begin, self._written = self._written, self._written + self._filled
        self.send(begin, self._filled)
        self._filled = 0

    def _close(self) -> None:
        self._fd = -1
        self._open.close()


class PartsWriter(SlotWriter):
    """Writes parts of an existing file, in the order of their offsets, while other ranks write other parts.

    Whole pages bypass the page cache. The rest of a page may belong to another rank, so partial pages go through the
    page cache, which merges them.
    """

    def __init__(self, slots: Slots, path: Path, direct: int, cached: int) -> None:
        """`direct` and `cached`: the file, opened twice."""
        super().__init__(slots, direct, path)
        self._fd = cached
        preferred = min(os.fstat(cached).st_blksize, BLOCK)  # beyond a slot nothing would go past the page cache
        self._page = max(mmap.PAGESIZE, slots.offset_align, preferred)
        self._begin = self._end = 0  # what the slot holds of the file

    def buffer(self, at: int) -> Tensor:
        """Returns memory for bytes from `at` on, up to the end of the slot; `advance` counts what was written."""
        if at != self._end:
            self._flush()
            self._begin = self._end = at
        return self.bytes[at % BLOCK : BLOCK]

    def advance(self, nbytes: int) -> None:
        """Counts nbytes of the buffer as filled."""
        self._end += nbytes
        if not self._end % BLOCK:
            self._flush()

    def finish(self) -> None:
        """Writes the remaining bytes and syncs the file."""
        self._flush()
        self.wait()
        os.fsync(self._fd)

    def __exit__(self, *_: object) -> None:
        self.slots.forget(self._number)

    def _flush(self) -> None:
        begin, end, page = self._begin, self._end, self._page
        first, last = min(-(-begin // page) * page, end), end // page * page
        self._write_beside(begin, first)
        self._write_beside(max(last, first), end)
        if first < last:
            self.send(first, last - first, first % BLOCK)
        self._begin = end

    def _write_beside(self, begin: int, end: int) -> None:
        data = self.bytes.numpy().data[begin % BLOCK :][: end - begin]
        while data:
            done = os.pwrite(self._fd, data, begin)
            data, begin = data[done:], begin + done


class FileReader(AbstractContextManager["FileReader"]):
    """Reads the file that a row of the index describes, through slots that other readers may share."""

    def __init__(self, folder: Path, row: FileRow, slots: Slots, files: OpenFiles) -> None:
        self.path, self.row = folder / row.name, row
        self._slots, self._number = slots, -1
        self._open = ExitStack()
        with failing("Opening", self.path, 0, row.nbytes):
            self._fd = self._open.enter_context(files.open(self.path))
        try:
            self._sums = files.tables.get(self.path) or self._table()
            if files.holds(self.path):  # past the page cache a file cannot be read at any offset later
                files.tables[self.path] = self._sums
            self._number = slots.register(self._fd, self.path)
        except BaseException:
            self.close()
            raise

    def read(self, spans: Iterable[Span], report: Callable[[int], object] = int) -> list[int]:
        """Passes the bytes of each span to its `take`, piece by piece in the order of the file, after checking them; or
        copies them to the span's address.

        Returns the blocks that were read.

        A block that several spans touch is read once. The bytes are valid only during the call of `take`.
        """
        ordered = sorted((span for span in spans if span[1]), key=lambda span: span[0])
        for offset, nbytes, _ in ordered:
            if offset < 0 or nbytes < 0 or offset + nbytes > self.row.table:
                raise ValueError(
                    f"{offset} to {offset + nbytes} is no span of the {self.row.table} bytes of {self.path}"
                )
        waiting = deque(ordered)
        under_way: list[Span] = []
        blocks = list(_blocks(ordered))
        slots = self._slots
        for begin, nbytes, slot, error in self._read_blocks(blocks):
            if error is not None:
                raise error
            end, address = begin + nbytes, slots.address(slot) - begin
            while waiting and waiting[0][0] < end:
                under_way.append(waiting.popleft())
            for offset, length, take in under_way:
                low, high = max(offset, begin), min(offset + length, end)
                if isinstance(take, int):
                    copy_bytes(take + low - offset, address + low, high - low)
                else:
                    take(slots.bytes[slot][low - begin : high - begin], low - offset)
                report(high - low)
            under_way = [span for span in under_way if span[0] + span[1] > end]
        return blocks

    def find_damage(self, blocks: Iterable[int], report: Callable[[int], object] = int) -> Iterator[IoError]:
        """Yields an error for each block that is damaged or cannot be read; reports the bytes of each."""
        for _, nbytes, _, error in self._read_blocks(blocks):
            if error is not None:
                yield error
            report(nbytes)

    def close(self) -> None:
        """Lets go of the file."""
        number, self._number = self._number, -1
        if number >= 0:
            self._slots.forget(number)
        self._open.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _table(self) -> array[int]:
        row = self.row
        nbytes = os.fstat(self._fd).st_size
        if nbytes != row.nbytes:
            how = "truncated" if nbytes < row.nbytes else "written to"
            says = f"has {nbytes} bytes, and {row.nbytes} were written: something has {how} it"
            raise self._broken(says, min(nbytes, row.nbytes), abs(row.nbytes - nbytes), errno.ENODATA)
        where = failing("Reading", self.path, row.table, row.nbytes - row.table)
        with where, open(self._fd, "rb", closefd=False) as file:
            file.seek(row.table)
            table = file.read(row.nbytes - row.table)
        if crc32c(_address_of(table), len(table)) != row.crc:
            raise self._broken("is damaged: its table of checksums is not what was written", row.table, len(table))
        sums = array("I", table)
        if sys.byteorder == "big":
            sums.byteswap()
        return sums

    def _read_blocks(self, blocks: Iterable[int]) -> Iterator[tuple[int, int, int, IoError | None]]:
        """Yields blocks in order, as (offset, nbytes, slot, error), while later ones are being read."""
        if self._number < 0:
            raise ValueError(f"{self.path} is closed: nothing can be read from it")
        slots = self._slots
        free = list(range(len(slots.ring.slots)))
        pending: deque[tuple[int, int, int, Ticket]] = deque()
        coming = iter(blocks)
        try:
            while True:
                while free and (block := next(coming, None)) is not None:
                    begin, slot = block * BLOCK, free.pop()
                    nbytes = min(BLOCK, self.row.table - begin)
                    ticket = slots.start(native.IO_READ, slot, self._number, begin, nbytes)
                    pending.append((begin, nbytes, slot, ticket))
                if not pending:
                    return
                begin, nbytes, slot, ticket = pending.popleft()
                yield begin, nbytes, slot, self._error(begin, nbytes, slot, ticket)
                free.append(slot)
        finally:
            slots.drain()  # nothing is written into a slot that somebody else may use next

    def _error(self, begin: int, nbytes: int, slot: int, ticket: Ticket) -> IoError | None:
        """Waits for a read; returns an error if the bytes are not those that were written."""
        try:
            ticket.wait()
        except IoError as error:
            return failed("Reading", self.path, error)
        expected, crc = self._sums[begin // BLOCK], crc32c(self._slots.address(slot), nbytes)
        if crc == expected:
            return None
        says = f"is damaged in its {nbytes} bytes from offset {begin} on: their CRC32C is {crc:08x}"
        return self._broken(f"{says}, what was written had {expected:08x}", begin, nbytes)

    def _broken(self, says: str, offset: int, nbytes: int, number: int = errno.EBADMSG) -> IoError:
        return file_error(self.path, f"{says}. {RESTORE}", number, offset=offset, nbytes=nbytes)


def _blocks(spans: list[Span]) -> Iterator[int]:
    """Yields the blocks that the spans touch, each once."""
    end = 0
    for offset, nbytes, _ in spans:
        behind = -(-(offset + nbytes) // BLOCK)
        yield from range(max(offset // BLOCK, end), behind)
        end = max(end, behind)


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yields the bytes of a tensor in row-major order: a view if it is contiguous, else copies of at most `most`
    bytes."""
    tensor = tensor.detach()
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or nbytes <= most or not tensor.ndim:
        yield tensor.contiguous().view(-1).view(torch.uint8)
        return
    step = most * len(tensor) // nbytes
    for row in range(0, len(tensor), max(step, 1)):
        yield from _pieces(tensor[row : row + step] if step else tensor[row], most)


def _address_of(data: bytes) -> int:
    """Returns the address of the bytes, valid as long as the object lives."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copies bytes between addresses in this thread, without the GIL, so that training continues."""
    ctypes.memmove(target, source, nbytes)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies a tensor into one of the same shape; through torch only if it must, whose threads would slow training.

    The version counter of `target` may not be bumped.
    """
    dense = target.is_contiguous() and source.is_contiguous() and not (source.is_conj() or source.is_neg())
    alike = (target.dtype, target.shape) == (source.dtype, source.shape)
    if dense and alike and target.device.type == source.device.type == "cpu":
        copy_bytes(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)
