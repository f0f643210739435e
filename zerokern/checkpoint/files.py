"""A data file of a checkpoint, written once from its beginning to its end.

Behind the data stands a table: the CRC32C of each block of 1 MiB, a 32-bit little-endian number each. The index holds
the table's own checksum, so that no byte of the file is believed unchecked.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from zerokern.checkpoint.index import FileRow
from zerokern.checkpoint.staging import BLOCK, Outgoing, Staging, address_of, copy, crc32c
from zerokern.io.advice import failed
from zerokern.io.engine import Faults
from zerokern.io.files import reserve

__all__ = ["FileWriter", "PartsWriter", "pieces"]

CACHED = 256 << 10  # bytes that are copied, then summed while they are in the processor's cache
GROW, MOST_GROW = 16 << 20, 1 << 30  # bytes asked of the file system at a time, ahead of writing
MODE = 0o666  # less the umask: a checkpoint is the user's document, not private swap


class FileWriter:
    """Writes a new file, append by append. `expected`: its length, if known, is asked of the file system at once."""

    def __init__(
        self,
        path: Path,
        *,
        expected: int = 0,
        depth: int | None = None,
        block: int | None = None,
        engine: str = "auto",
        faults: Faults | None = None,
    ) -> None:
        self.path = path
        self.nbytes = 0  # appended so far
        self._sums = array("I")
        self._sum = 0  # of the block under way
        self._allocated = self._written = 0
        self._filled = 0  # bytes so far of the slot that is being filled
        self._staging: Staging | None = None
        self._outgoing: Outgoing | None = None
        self._fd = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, MODE)
            if expected:
                self._allocate(expected)
            self._staging = Staging(path.parent, depth=depth, block=block, engine=engine, faults=faults)
            self._outgoing = Outgoing(self._staging, self._fd, path)
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError):
                raise failed("Making", path, error, 0, expected) from error
            raise

    def append(self, data: bytes | Tensor) -> int:
        """Takes over the bytes of a tensor of any device and strides, in row-major order; returns where they begin.

        The tensor may change as soon as this returns.
        """
        begin = self.nbytes
        if isinstance(data, bytes):
            self._copy(address_of(data), len(data))
            self.nbytes += len(data)
            return begin
        for piece in pieces(data, BLOCK):
            if piece.device.type == "cpu":
                self._copy(piece.data_ptr(), piece.numel())
            else:
                self._copy_from_device(piece)
            self.nbytes += piece.numel()
        return begin

    def align(self, nbytes: int) -> None:
        """Goes on at a multiple of so many bytes, with zeros up to there."""
        self.append(bytes(-self.nbytes % nbytes))

    def finish(self) -> FileRow:
        """Writes what is left, and the table; returns when all of it lasts."""
        table = self.nbytes
        if self._filled:
            self._end_block()
        if sys.byteorder == "big":
            self._sums.byteswap()
        sums = self._sums.tobytes()
        address = address_of(sums)
        row = FileRow(self.path.name, table + len(sums), table, crc32c(address, len(sums)))
        self._copy(address, len(sums), checked=False)
        self._flush()
        self._open.finish()
        try:
            os.ftruncate(self._fd, row.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise failed("Finishing", self.path, error, 0, row.nbytes) from error
        self._close()
        return row

    def abandon(self) -> None:
        """Removes the file, unless it is finished."""
        if self._fd >= 0:
            self._close()
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @property
    def _open(self) -> Outgoing:
        if self._outgoing is None:
            raise ValueError(f"{self.path} is finished or abandoned: nothing can be added to it")
        return self._outgoing

    def _copy(self, address: int, nbytes: int, checked: bool = True) -> None:
        """Copies into the slots."""
        outgoing = self._open
        while nbytes:
            part = min(nbytes, CACHED, BLOCK - self._filled)
            copy(outgoing.address + self._filled, address, part)
            self._advance(part, checked)
            address += part
            nbytes -= part

    def _copy_from_device(self, piece: Tensor) -> None:
        """A slot at a time: each copy waits for the device."""
        outgoing = self._open
        while piece.numel():
            part = min(piece.numel(), BLOCK - self._filled)
            outgoing.bytes[self._filled : self._filled + part].copy_(piece[:part])
            self._advance(part, True)
            piece = piece[part:]

    def _advance(self, nbytes: int, checked: bool) -> None:
        """The slot, which is a block of the file, holds so many bytes more: sums them, and sends it when it is full."""
        if checked:
            self._sum = crc32c(self._open.address + self._filled, nbytes, self._sum)
        self._filled += nbytes
        if self._filled == BLOCK:
            if checked:
                self._end_block()
            self._flush()

    def _end_block(self) -> None:
        self._sums.append(self._sum)
        self._sum = 0

    def _flush(self) -> None:
        """Sends the slot on its way, and waits until the next one is free."""
        if not self._filled:
            return
        begin, self._written = self._written, self._written + self._filled
        if self._written > self._allocated:
            self._grow(self._written)
        self._open.send(begin, self._filled)
        self._filled = 0

    def _grow(self, nbytes: int) -> None:
        """Asks for more at once, the longer the file is: a file that grows write by write is written one at a time."""
        ahead = max(nbytes, self._allocated + min(max(GROW, self._allocated), MOST_GROW))
        try:
            try:
                self._allocate(ahead)
            except OSError:
                self._allocate(nbytes)
        except OSError as error:
            raise failed("Writing", self.path, error, self._allocated, nbytes - self._allocated) from error

    def _allocate(self, nbytes: int) -> None:
        reserve(self._fd, nbytes)
        self._allocated = nbytes

    def _close(self) -> None:
        """Waits for what is pending, and lets go of the file and of the memory."""
        staging, self._staging, self._outgoing = self._staging, None, None
        if staging is not None:
            staging.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PartsWriter:
    """Writes parts of a file that is there, and that others write into as well: in the order of their places.

    Whole pages go past the page cache, through slots. What is beside them in a page may be another's: it goes through
    the page cache, which joins the two.
    """

    def __init__(self, staging: Staging, path: Path, direct: int, cached: int) -> None:
        """`direct` and `cached`: the file, opened twice."""
        self._outgoing, self._fd = Outgoing(staging, direct, path), cached
        preferred = min(os.fstat(cached).st_blksize, BLOCK)  # beyond a slot nothing would go past the page cache
        self._page = max(mmap.PAGESIZE, staging.offset_align, preferred)
        self._begin = self._end = 0  # what the slot holds of the file

    def room(self, at: int) -> Tensor:
        """Memory for the bytes from `at` on, as many as the slot has; then tell `took` how many there are."""
        if at != self._end:
            self._flush()
            self._begin = self._end = at
        return self._outgoing.bytes[at % BLOCK : BLOCK]

    def took(self, nbytes: int) -> None:
        """So many bytes are there."""
        self._end += nbytes
        if not self._end % BLOCK:
            self._flush()

    def finish(self) -> None:
        """Returns when all of it lasts."""
        self._flush()
        self._outgoing.finish()
        os.fsync(self._fd)

    def __enter__(self) -> PartsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.close()

    def _flush(self) -> None:
        begin, end, page = self._begin, self._end, self._page
        first, last = min(-(-begin // page) * page, end), end // page * page
        self._write_beside(begin, first)
        self._write_beside(max(last, first), end)
        if first < last:
            self._outgoing.send(first, last - first, first % BLOCK)
        self._begin = end

    def _write_beside(self, begin: int, end: int) -> None:
        data = self._outgoing.bytes.numpy().data[begin % BLOCK :][: end - begin]
        while data:
            done = os.pwrite(self._fd, data, begin)
            data, begin = data[done:], begin + done


def pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """The bytes of a tensor in row-major order: where they lie, if contiguous, else copies of at most `most` bytes."""
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
        yield from pieces(tensor[row : row + step] if step else tensor[row], most)
