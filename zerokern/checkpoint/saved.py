"""A checkpoint of zk.save, to be loaded: requests that overlap, straight into tensors, each block checked."""

from __future__ import annotations

import errno
import os
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.index import NAME, FileRow, unfit
from zerokern.checkpoint.published import Held, Published
from zerokern.checkpoint.source import Landing, Source, Told, landings, sound, untold
from zerokern.checkpoint.staging import BLOCK, READ, Span, Staging, address_of, crc32c
from zerokern.core.errors import IoError, got
from zerokern.core.ports import plugs
from zerokern.io.advice import failed, refused
from zerokern.io.ticket import Ticket, again

__all__ = ["FileReader", "Saved", "open_checkpoint"]

RESTORE = "Restore the file from a copy, or load another checkpoint"


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """What can be loaded from a folder or a file; nothing of the tensors is read yet, and nothing in it is run.

    Plugs of the port "checkpoint source" open what zk.save has not written.

    >>> open_checkpoint("no such folder")
    Traceback (most recent call last):
    ...
    zerokern.core.errors.IoError: no such folder does not exist. No other checkpoint was ever published in it ...
    """
    place = Path(path)
    try:
        with sound(place, TypeError, ValueError):
            for open_foreign in plugs("checkpoint source") if not (place / NAME).exists() else ():
                source: Source | None = open_foreign(place)
                if source is not None:
                    return source
            return Saved(Published.open(place, hold=True))
    except OSError as error:
        raise refused(error, place, "Loading") from error


@dataclass(frozen=True)
class Arrived:
    """A block of the file in memory: bytes from `begin` on, or why they are not there."""

    begin: int
    bytes: Tensor
    error: IoError | None = None


class FileReader:
    """Reads the file that a row of the index describes, through slots that other readers may share."""

    def __init__(self, folder: Path, row: FileRow, staging: Staging, held: Held | None = None) -> None:
        self.path, self.row = folder / row.name, row
        self._staging, self._number = staging, -1
        try:
            lent = None if held is None else held.fd(self.path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC) if lent is None else lent
        except OSError as error:
            raise failed("Opening", self.path, error, 0, row.nbytes) from error
        self._lent = lent is not None
        try:
            sums = held.tables.get(self.path) if held is not None else None
            self._sums = self._table() if sums is None else sums
            if held is not None and self._lent:  # what is read past the page cache cannot be read at any offset later
                held.tables[self.path] = self._sums
            self._number = staging.enter(self._fd, self.path)
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
        for found in self._arrivals(_blocks(ordered)):
            if found.error is not None:
                raise found.error
            end = found.begin + len(found.bytes)
            while waiting and waiting[0][0] < end:
                under_way.append(waiting.popleft())
            for offset, nbytes, take in under_way:
                low, high = max(offset, found.begin), min(offset + nbytes, end)
                take(found.bytes[low - found.begin : high - found.begin], low - offset)
            under_way = [span for span in under_way if span[0] + span[1] > end]

    def damage(self, blocks: Iterable[int], told: Told = untold) -> Iterator[IoError]:
        """Those of the blocks that are not as written, or cannot be read. `told` is told the bytes of each."""
        for found in self._arrivals(blocks):
            if found.error is not None:
                yield found.error
            told(len(found.bytes))

    def close(self) -> None:
        """Lets go of the file."""
        number, self._number = self._number, -1
        if number >= 0:
            self._staging.drain()
            self._staging.leave(number)
        fd, self._fd = self._fd, -1
        if fd >= 0 and not self._lent:
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

    def _arrivals(self, blocks: Iterable[int]) -> Iterator[Arrived]:
        """Blocks as they come, in their order; later ones are under way meanwhile."""
        if self._number < 0:
            raise ValueError(f"{self.path} is closed: nothing can be read from it")
        staging = self._staging
        free = list(range(len(staging.slots)))
        pending: deque[tuple[Arrived, int, Ticket]] = deque()
        coming = iter(blocks)
        try:
            while True:
                while free and (block := next(coming, None)) is not None:
                    begin, slot = block * BLOCK, free.pop()
                    nbytes = min(BLOCK, self.row.table - begin)
                    found = Arrived(begin, staging.bytes[slot][:nbytes])
                    pending.append((found, slot, staging.start(READ, slot, self._number, begin, nbytes)))
                if not pending:
                    return
                found, slot, ticket = pending.popleft()
                yield self._checked(found, ticket)
                free.append(slot)
        finally:
            staging.drain()  # nothing is written into a slot that somebody else may use next

    def _checked(self, found: Arrived, ticket: Ticket) -> Arrived:
        """What a request brought, or why it did not."""
        try:
            ticket.wait()
        except IoError as error:
            return replace(found, error=failed("Reading", self.path, error))
        nbytes, expected = len(found.bytes), self._sums[found.begin // BLOCK]
        crc = crc32c(found.bytes.data_ptr(), nbytes)
        if crc == expected:
            return found
        says = f"is damaged in its {nbytes} bytes from offset {found.begin} on: their CRC32C is {crc:08x}"
        broken = self._broken(f"{says}, what was written had {expected:08x}", found.begin, nbytes)
        return replace(found, error=broken)

    def _broken(self, says: str, offset: int, nbytes: int, number: int = errno.EBADMSG) -> IoError:
        return unfit(self.path, f"{says}. {RESTORE}", number, offset=offset, nbytes=nbytes)


def _blocks(spans: list[Span]) -> Iterator[int]:
    """Those that the spans touch, each once."""
    end = 0
    for offset, nbytes, _ in spans:
        behind = -(-(offset + nbytes) // BLOCK)
        yield from range(max(offset // BLOCK, end), behind)
        end = max(end, behind)


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    """All of it, or what there is."""
    parts = []
    while nbytes and (part := os.pread(fd, nbytes, offset)):
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return b"".join(parts)


class Saved(Source):
    """What `Published` has found."""

    kind = "zerokern"

    def __init__(self, published: Published) -> None:
        self.published, self.path, self.index = published, published.folder, published.index
        self.tensors, self.values = self.index.tensors, self.index.values
        self._slots: Staging | None = None

    @property
    def _staging(self) -> Staging:
        """The slots that it all passes through, until `close`."""
        self._slots = self._slots or Staging(self.path)
        return self._slots

    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        of_file: dict[int, list[Landing]] = {}
        for landing in landings(items, self.tensors):
            of_file.setdefault(landing.box.file, []).append(landing)
        if not of_file:
            return
        try:
            for number, some in sorted(of_file.items()):
                try:
                    with self._reader(number) as reader:
                        reader.read(span for landing in some for span in landing.spans(told))
                except IoError as error:
                    raise self._with_keys(error, number) from error
        finally:  # what came from the processor's own copying is unknown to torch
            written = [one.target for some in of_file.values() for one in some if not one.target.is_inference()]
            torch.autograd.graph.increment_version(written)

    def _reader(self, number: int) -> FileReader:
        row, held = self.index.files[number], self.published.held
        return FileReader(self.path, row, self._staging, held)

    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the blocks; each error names file, offset and keys."""
        if not 0 <= rank < world:
            raise ValueError(got("rank", rank, f"0 to {world - 1}"))
        files = self.index.files
        total = sum(file.blocks for file in files)
        begin, end = total * rank // world, total * (rank + 1) // world
        before = 0
        for number, file in enumerate(files):
            first, behind = max(begin - before, 0), min(end - before, file.blocks)
            before += file.blocks
            if first >= behind:
                continue
            try:
                with self._reader(number) as reader:
                    for error in reader.damage(range(first, behind), told):
                        yield self._with_keys(error, number)
            except IoError as error:
                yield self._with_keys(error, number)

    def _with_keys(self, error: IoError, number: int) -> IoError:
        """The same error with the keys that it concerns."""
        end = error.offset + max(error.nbytes, 1)
        keys = [
            key
            for key, row in self.index.tensors.items()
            if any(box.file == number and box.item[0] < end and sum(box.item) > error.offset for box in row.boxes)
        ]
        if not keys:
            return error
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        error.key = keys[0]
        return again(f"{error}. There lie {', '.join(keys[:3])}{more}", error)

    def likeness(self) -> str:
        return f"the save {self.index.save_id} (its files end in {sum(file.crc for file in self.index.files):x})"

    def close(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        self.published.close()

    def __del__(self) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return sum(file.table for file in self.index.files)
