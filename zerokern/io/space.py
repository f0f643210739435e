"""Room for extents: taken from the files there are, from files that grow, and back again when nothing moves in it."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable

from zerokern.core.errors import BudgetError, IoError
from zerokern.io.advice import refused
from zerokern.io.extents import Extent, Extents
from zerokern.io.files import Files, refuse_beyond_free
from zerokern.io.ticket import Ticket
from zerokern.memory.room import amount

__all__ = ["Space"]

LEAST_ALIGN = 4096  # 4Kn disks, and pages
STEP = 1 << 30  # without a budget files grow by as much as there is, from LEAST_STEP to STEP
LEAST_STEP = 16 << 20
MOST_FILE = 64 << 30  # without a budget, a longer one holds a single tensor


class Space:
    """Extents of the store's files. With a budget all of it is one file, allocated at once, and never grows."""

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
        """An extent for at least one byte. Raises before anything has changed; `table` says who holds the others."""
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
        """Frees what was left. Called with the lock of the transfers held."""
        while self._leaving:
            extent, last = self._leaving[0]
            if not last.done():
                if not wait:
                    return
                last.await_ended()
            self.extents.give(extent)
            self._leaving.popleft()

    def _grow(self, nbytes: int) -> None:
        """Lengthens the last file, or makes another, so that nbytes fit in one piece."""
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
        try:
            if last is not None and (last.nbytes + nbytes <= MOST_FILE or self.budget is not None):
                files.lengthen(last, last.nbytes + nbytes)
            else:
                files.make(nbytes)
        except OSError as error:
            path = last.path if last is not None else files.folder
            offset = last.nbytes if last is not None else 0
            what = f"Taking {amount(nbytes)} more"
            raise refused(error, files.folder, what, path=path, offset=offset, nbytes=nbytes) from error
