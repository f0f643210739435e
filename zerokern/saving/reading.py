"""A data file of a checkpoint, read in any order: in long requests that overlap, and no block believed unchecked."""

from __future__ import annotations

import errno
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from zerokern.core.errors import IoError
from zerokern.io.ticket import Ticket
from zerokern.saving.index import FileRow
from zerokern.saving.staging import BLOCK, READ, SLOT, Staging, address_of, crc32c, failed

__all__ = ["FileReader", "Span", "Take"]

PER_SLOT = SLOT // BLOCK
RESTORE = "Restore the file from a copy, or load another checkpoint"

Take = Callable[[Tensor, int], object]  # given bytes of a span, and where in the span they begin
Span = tuple[int, int, Take]  # offset and nbytes in the file


@dataclass(frozen=True)
class Arrived:
    """Blocks of the file in memory: bytes from `begin` on, or why they are not there."""

    begin: int
    bytes: Tensor
    error: IoError | None = None


class FileReader:
    """Reads the file that a row of the index describes. `staging` is shared with other readers, or its own.

    >>> import tempfile, torch
    >>> from zerokern.saving.files import FileWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FileWriter(Path(folder, "a_0.distcp")) as writer:
    ...         begin = writer.append(torch.arange(5, dtype=torch.uint8))
    ...         row = writer.finish()
    ...     with FileReader(Path(folder), row) as reader:
    ...         reader.read([(1, 3, lambda found, at: print(at, found.tolist()))])
    0 [1, 2, 3]
    """

    def __init__(self, folder: Path, row: FileRow, *, staging: Staging | None = None) -> None:
        self.path = folder / row.name
        self.row = row
        self._own = staging is None
        self._number = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise failed("Opening", self.path, error, 0, row.nbytes) from error
        self._staging = staging
        try:
            self._sums = self._table()
            self._staging = staging or Staging(folder)
            self._number = self._staging.enter(self._fd, self.path)
        except BaseException:
            self.close()
            raise

    def read(self, spans: Iterable[Span]) -> None:
        """Hands the bytes of each span to its `take`, piece by piece in the order of the file, once they are checked.

        A block that several spans touch is read once. The bytes are lent for the time of the call.
        """
        ordered = sorted((span for span in spans if span[1]), key=lambda span: span[0])
        for offset, nbytes, _ in ordered:
            if offset < 0 or nbytes < 0 or offset + nbytes > self.row.table:
                raise ValueError(
                    f"{offset} to {offset + nbytes} is no span of the {self.row.table} bytes of {self.path}"
                )
        waiting = deque(ordered)
        under_way: list[Span] = []
        for found in self._arrivals(_requests(ordered)):
            if found.error is not None:
                raise found.error
            end = found.begin + len(found.bytes)
            while waiting and waiting[0][0] < end:
                under_way.append(waiting.popleft())
            for offset, nbytes, take in under_way:
                low, high = max(offset, found.begin), min(offset + nbytes, end)
                take(found.bytes[low - found.begin : high - found.begin], low - offset)
            under_way = [span for span in under_way if span[0] + span[1] > end]

    def damage(
        self, begin_block: int = 0, end_block: int | None = None, progress: Callable[[int], object] | None = None
    ) -> Iterator[IoError]:
        """The blocks that are not as written, or cannot be read. `progress` is told the bytes of each step."""
        end_block = self.row.blocks if end_block is None else end_block
        firsts = range(begin_block, end_block, PER_SLOT)
        for found in self._arrivals((first, min(PER_SLOT, end_block - first)) for first in firsts):
            if found.error is not None:
                yield found.error
            if progress is not None:
                progress(len(found.bytes))

    def verify(
        self, begin_block: int = 0, end_block: int | None = None, progress: Callable[[int], object] | None = None
    ) -> None:
        """Raises what is wrong with the first damaged block."""
        for error in self.damage(begin_block, end_block, progress):
            raise error

    def close(self) -> None:
        """Lets go of the file."""
        staging, self._staging = self._staging, None
        if staging is not None and self._number >= 0:
            staging.drain()
            staging.leave(self._number)
        if staging is not None and self._own:
            staging.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _table(self) -> array[int]:
        row = self.row
        nbytes = os.fstat(self._fd).st_size
        if nbytes != row.nbytes:
            how = "truncated" if nbytes < row.nbytes else "written to"
            says = f"has {nbytes} bytes, and {row.nbytes} were written: something has {how} it"
            raise self._broken(says, min(nbytes, row.nbytes), abs(row.nbytes - nbytes), errno.ENODATA)
        try:
            table = _pread(self._fd, row.nbytes - row.table, row.table)
        except OSError as error:
            raise failed("Reading", self.path, error, row.table, row.nbytes - row.table) from error
        if crc32c(address_of(table), len(table)) != row.crc:
            raise self._broken("is damaged: its table of checksums is not what was written", row.table, len(table))
        sums = array("I", table)
        if sys.byteorder == "big":
            sums.byteswap()
        return sums

    def _arrivals(self, requests: Iterable[tuple[int, int]]) -> Iterator[Arrived]:
        """Blocks (first, count) as they come, in their order; later ones are under way meanwhile."""
        staging = self._staging
        if staging is None:
            raise ValueError(f"{self.path} is closed: nothing can be read from it")
        free = deque(range(len(staging.slots)))
        pending: deque[tuple[int, int, int, Ticket]] = deque()
        coming = iter(requests)
        try:
            while True:
                for first, count in islice(coming, len(free)):
                    begin = first * BLOCK
                    nbytes = min(count * BLOCK, self.row.table - begin)
                    slot = free.popleft()
                    pending.append((slot, begin, nbytes, staging.start(READ, slot, self._number, begin, nbytes)))
                if not pending:
                    return
                slot, begin, nbytes, ticket = pending.popleft()
                yield from self._arrived(staging.bytes[slot][:nbytes], begin, ticket)
                free.append(slot)
        finally:
            staging.drain()  # nothing is written into a slot that somebody else may use next

    def _arrived(self, found: Tensor, begin: int, ticket: Ticket) -> Iterator[Arrived]:
        """What a request brought: all of it, or each of its blocks where one is damaged."""
        try:
            ticket.wait()
        except IoError as error:
            yield Arrived(begin, found, failed("Reading", self.path, error))
            return
        address, first = found.data_ptr(), begin // BLOCK
        lengths = [min(BLOCK, len(found) - at) for at in range(0, len(found), BLOCK)]
        sums = [crc32c(address + i * BLOCK, nbytes) for i, nbytes in enumerate(lengths)]
        if sums == self._sums[first : first + len(sums)].tolist():
            yield Arrived(begin, found)
            return
        for i, nbytes in enumerate(lengths):
            at, broken = i * BLOCK, None
            if sums[i] != self._sums[first + i]:
                says = f"is damaged in its {nbytes} bytes from offset {begin + at} on: their CRC32C is {sums[i]:08x}"
                broken = self._broken(f"{says}, what was written had {self._sums[first + i]:08x}", begin + at, nbytes)
            yield Arrived(begin + at, found[at : at + nbytes], broken)

    def _broken(self, says: str, offset: int, nbytes: int, number: int = errno.EBADMSG) -> IoError:
        return IoError(
            f"{self.path} {says}. {RESTORE}", path=str(self.path), offset=offset, nbytes=nbytes, errno=number
        )


def _requests(spans: list[Span]) -> Iterator[tuple[int, int]]:
    """The blocks (first, count) that the spans touch, each once, as many in one request as a slot holds."""
    begin = end = 0
    for offset, nbytes, _ in spans:
        first, behind = offset // BLOCK, -(-(offset + nbytes) // BLOCK)
        if first > end:
            yield from _cut(begin, end)
            begin = first
        end = max(end, behind)
    yield from _cut(begin, end)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((first, min(PER_SLOT, end - first)) for first in range(begin, end, PER_SLOT))


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    """All of it, or what there is."""
    parts = []
    while nbytes and (part := os.pread(fd, nbytes, offset)):
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return b"".join(parts)
