"""Allocates spans of a store's files, which grow as needed, and frees them again."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from zerokern.core.errors import BackendError, BudgetError, IoError
from zerokern.io.advice import refusing
from zerokern.io.files import Files, refuse_beyond_free
from zerokern.io.ticket import Ticket
from zerokern.memory.layout import FreeSpans
from zerokern.memory.room import amount

__all__ = ["Extent", "Extents", "Space"]

LEAST_ALIGN = 4096  # 4Kn disks, and pages
STEP = 1 << 30  # without a budget files grow by as much as there is, from LEAST_STEP to STEP
LEAST_STEP = 16 << 20
APART = 1 << 62  # no file is as long
MOST_FILE = 64 << 30  # without a budget, a longer one holds a single tensor


class Extent(NamedTuple):
    """A span of one file that belongs to one key."""

    file: int
    offset: int
    nbytes: int


class Extents:
    """The free spans of any number of files: first fit, neighbours merged, every extent a multiple of `align`.

    Pure arithmetic: no file is touched.

    >>> extents = Extents(4096)
    >>> extents.grow(0, 16384)
    >>> extents.take(5000), extents.take(1), extents.take(8192)
    (Extent(file=0, offset=0, nbytes=8192), Extent(file=0, offset=8192, nbytes=4096), None)
    >>> extents.give(Extent(0, 0, 8192))
    >>> extents.take(8000).offset, extents.free_nbytes
    (0, 4096)
    """

    def __init__(self, align: int) -> None:
        self.align = align
        self._free = FreeSpans(0)  # file after file, so far apart that they never touch
        self._lengths: list[int] = []

    def capacity(self, nbytes: int) -> int:
        """Returns the length of an extent for so many bytes."""
        return -(-nbytes // self.align) * self.align

    def take(self, nbytes: int) -> Extent | None:
        """Takes the first span that fits at least one byte; returns None if there is none."""
        capacity = self.capacity(nbytes)
        at = self._free.take(capacity)
        return None if at is None else Extent(*divmod(at, APART), capacity)

    def give(self, extent: Extent) -> None:
        """Frees an extent that was taken."""
        self._free.give(extent.file * APART + extent.offset, extent.nbytes)

    def grow(self, file: int, to_nbytes: int) -> None:
        """Adds what a file, new or longer than before, has gained."""
        self._lengths += [0] * (file + 1 - len(self._lengths))
        length = to_nbytes - to_nbytes % self.align
        if length > self._lengths[file]:
            self.give(Extent(file, self._lengths[file], length - self._lengths[file]))
            self._lengths[file] = length

    def claim(self, lengths: list[int], taken: Iterable[Extent]) -> None:
        """Starts with existing files, of which all but the taken extents is free."""
        taken = sorted(taken)
        for one in taken:
            if one.offset % self.align or one.nbytes % self.align:
                raise BackendError(
                    f"a file that was made for another disk has an extent at offset {one.offset}, {one.nbytes} bytes; "
                    f"here both must be multiples of {self.align}. Copy its tensors to a new store"
                )
        self._lengths = [0] * len(lengths)
        for one in taken:
            self.grow(one.file, one.offset)
            self._lengths[one.file] = one.offset + one.nbytes
        for file, length in enumerate(lengths):
            self.grow(file, length)

    @property
    def free_nbytes(self) -> int:
        return self._free.total

    @property
    def largest(self) -> int:
        """The length of the longest free span."""
        return self._free.largest

    @property
    def nbytes(self) -> int:
        """The lengths of all files together."""
        return sum(self._lengths)


class Space:
    """The extents of a store's files. With a budget there is one file, allocated at once, that never grows."""

    def __init__(self, files: Files, budget: int | None, taken: Iterable[Extent] = ()) -> None:
        self._files, self.budget = files, budget
        self._leaving: deque[tuple[Extent, Ticket]] = deque()  # freed while a transfer was still moving in it
        taken = list(taken)
        have = sum(file.nbytes for file in files.all)
        if budget is not None:
            budget = -(-budget // LEAST_ALIGN) * LEAST_ALIGN
            if have > budget:
                raise BudgetError(
                    f"budget={amount(budget)} is less than what {files.folder} holds already, {amount(have)} in files; "
                    "ask for at least that"
                )
            if budget > have:
                refuse_beyond_free(files.folder, budget - have, budget, have)
                self._grow_file(budget - have)
        elif not files.all:
            self._grow_file(LEAST_STEP)
        self.extents = Extents(max(LEAST_ALIGN, files.offset_align))
        self.extents.claim([file.nbytes for file in files.all], taken)

    def take(self, nbytes: int, table: Callable[[], str]) -> Extent:
        """Takes an extent for at least one byte. Raises before anything changes; `table` says who holds the others."""
        self._reclaim(wait=False)
        found = self.extents.take(nbytes)
        if found is None and self.budget is None:
            self._grow(self.extents.capacity(nbytes))
            found = self.extents.take(nbytes)
        if found is None and self._leaving:
            self._reclaim(wait=True)
            found = self.extents.take(nbytes)
        if found is None:
            raise BudgetError(
                f"{amount(nbytes)} do not fit into budget={amount(self.budget or 0)} of {self._files.folder}: "
                f"free are {amount(self.extents.free_nbytes)}, in one piece {amount(self.extents.largest)}.\n"
                f"{table()}\nDelete keys or open the store with a larger budget"
            )
        return found

    def give(self, extent: Extent, last: Ticket | None) -> None:
        """Frees an extent, once the last transfer in it has ended."""
        if last is None or last.done():
            self.extents.give(extent)
        else:
            self._leaving.append((extent, last))

    def _reclaim(self, wait: bool) -> None:
        """Frees extents whose last transfer has ended. Called with the lock of the transfers held."""
        while self._leaving:
            extent, last = self._leaving[0]
            if not last.done():
                if not wait:
                    return
                last.await_ended()
            self.extents.give(extent)
            self._leaving.popleft()

    def _grow(self, nbytes: int) -> None:
        """Lengthens the last file, or makes another, so that nbytes fit in one span."""
        step = max(nbytes, min(STEP, max(LEAST_STEP, self.extents.nbytes)))
        for more in dict.fromkeys((step, nbytes)):
            try:
                self._grow_file(more)
                break
            except IoError as error:
                if more == nbytes or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
        for number, file in enumerate(self._files.all):
            self.extents.grow(number, file.nbytes)

    def _grow_file(self, nbytes: int) -> None:
        files = self._files
        last = files.all[-1] if files.all else None
        path, offset = (files.folder, 0) if last is None else (last.path, last.nbytes)
        with refusing(files.folder, f"Taking {amount(nbytes)} more", path=path, offset=offset, nbytes=nbytes):
            if last is not None and (last.nbytes + nbytes <= MOST_FILE or self.budget is not None):
                files.lengthen(last, last.nbytes + nbytes)
            else:
                files.make(nbytes)
