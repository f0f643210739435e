"""A store's folder as this process holds it: lock, engine, files, transfers; opened in order, let go of in reverse."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerokern.core.errors import IoError
from zerokern.io import index
from zerokern.io.advice import refused
from zerokern.io.engine import Engine, Faults
from zerokern.io.files import Files, make_folder, remains
from zerokern.io.lock import FolderLock, let_go_in_child
from zerokern.io.probing import settings
from zerokern.io.space import Space
from zerokern.io.ticket import Transfers, again

if TYPE_CHECKING:
    from zerokern.memory import Arena

__all__ = ["Belongings"]

_log = logging.getLogger("zerokern.io")


class Belongings:
    """Everything of a store that must be let go of, apart from the store itself: a finalizer may hold it."""

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool,
        budget: int | None,
        engine: str,
        depth: int | None,
        block: int | None,
        faults: Faults | None,
        arena: Arena | None,
    ) -> None:
        self.folder, self.durable = folder, durable
        self.open, self.unpublished = False, False
        self._sync_failure: IoError | None = None
        self.pid = os.getpid()
        self._registered: Arena | None = None
        self._lock_number = -1
        try:
            make_folder(folder, 0o700)
            self.lock = FolderLock(folder)
        except OSError as error:
            raise refused(error, folder, "A store") from error
        try:
            self.rows = self._published()
            self._clear(keep=self._names)
            depth, block = settings(folder, depth, block)
            self.engine = Engine(engine, depth=depth, block=block, faults=faults)
        except BaseException as error:
            self.lock.release()
            if isinstance(error, OSError):
                raise refused(error, folder, "A store") from error
            raise
        self.files = Files(folder, self.engine, place=self.lock.folder_fd, named=durable)
        try:
            # The kernel lets go of a killed ring's files when its last transfer has ended. With the lock among them no
            # other process takes the folder while a write may still land in it.
            self._lock_number = self.engine.file(self.lock.fd, 1, 1)
            self._reopen()
            taken = (row.extent for row in self.rows if row.extent is not None)
            self.space = Space(self.files, budget, taken)
            self.transfers = Transfers(self.engine, self.files.paths)
            if arena is not None:
                # The ring goes on moving these very pages: an arena that is closed meanwhile must not give them back.
                self._pages = arena.view_at(arena.base, torch.uint8, arena.nbytes)
                if self.engine.register(arena):
                    self._registered = arena
        except BaseException as error:
            self._let_go_of_files()
            if isinstance(error, OSError):
                raise refused(error, folder, "A store") from error
            raise
        self.open = True
        let_go_in_child(self)

    def _published(self) -> list[index.IndexRow]:
        """The rows of a durable store that was here before."""
        found = index.read(self.folder)
        if found is not None and not self.durable:
            raise IoError(
                f"{self.folder} holds a durable store with {len(found[1])} keys; durable=False would remove it. "
                "Open it with durable=True, choose another folder, or remove its files yourself",
                path=str(self.folder),
                errno=errno.EEXIST,
            )
        self._names = found[0] if found else []
        return found[1] if found else []

    def _clear(self, keep: list[str]) -> None:
        """Removes what a killed owner left behind."""
        left = [path for path in remains(self.folder) if path.name not in keep]
        for path in left:
            path.unlink(missing_ok=True)
        if left:
            _log.info("%s: %d files of a store that ended without close() are removed", self.folder, len(left))

    def _reopen(self) -> None:
        for name in self._names:
            try:
                self.files.reopen(name)
            except FileNotFoundError:
                path = self.folder / name
                raise IoError(
                    f"{path} is named by {index.NAME} and is not there; restore it, or remove the folder's files to "
                    "begin anew",
                    path=str(path),
                    errno=errno.ENOENT,
                ) from None
        # A longer file would read as zeros where bytes are missing: what is lost is written down before any is made so.
        self.rows = [self._checked(row) for row in self.rows]
        if any(row.lost for row in self.rows):
            self.publish(self.rows)
        for extent in (row.extent for row in self.rows if row.extent is not None):
            file, end = self.files.all[extent.file], extent.offset + extent.nbytes
            if file.nbytes < end:
                self.files.lengthen(file, end)

    def _checked(self, row: index.IndexRow) -> index.IndexRow:
        """The row, or where its file ends before its bytes do, one that says so."""
        if row.extent is None:
            return row
        file, offset = self.files.all[row.extent.file], row.extent.offset
        if offset + row.nbytes <= file.nbytes:
            return row
        says = (
            f"{file.path} had {file.nbytes} bytes when it was opened, {row.key!r} lies at offset {offset}, "
            f"{row.nbytes} bytes: something has truncated the file"
        )
        return row._replace(extent=None, lost=says)

    def publish(self, rows: list[index.IndexRow]) -> None:
        """Makes what these rows say the state that a reopened store begins with."""
        if self._sync_failure is not None:
            raise again(
                f"{self._sync_failure}. It is unknown since then what the disk holds; another fsync would not tell. "
                "Close the store; what the last sync() published is kept",
                self._sync_failure,
            )
        try:
            self.files.sync()
        except IoError as error:
            self._sync_failure = error
            raise
        # From the rename on the index names these files, also where what follows it fails.
        self._names = [file.path.name for file in self.files.all]
        try:
            index.publish(self.folder, self._names, rows)
        except OSError as error:
            raise refused(error, self.folder, "Publishing the index") from error
        self.unpublished = False

    def close(self) -> None:
        """Waits for all transfers, then removes the files that nobody wants to keep, and unlocks the folder."""
        if not self.open:
            return
        self.open = False
        try:
            with self.transfers.lock:
                self.transfers.drain()
        finally:
            self._let_go_of_files()

    def _let_go_of_files(self) -> None:
        try:
            self.files.close(keep=self._names)
            if self._registered is not None:
                self.engine.forget(self._registered)
            if self._lock_number >= 0:
                self.engine.forget_file(self._lock_number)
        finally:
            self.engine.close()
            self.lock.release()

    def abandon(self) -> None:
        """What is left to do for a store that nobody closed."""
        if not self.open:
            return
        if self.durable and self.unpublished:
            _log.warning("%s: not closed; what was put since the last sync() is not kept", self.folder)
        self.close()
        for ticket in self.transfers.untold:
            _log.error("%s: not closed, and nobody was told: %s", self.folder, ticket._failure)

    def let_go(self) -> None:
        """In a forked child: all of it stays the parent's."""
        if self.open:
            self.open = False
            self.transfers.let_go()
            self.engine.close()
            self.files.close(keep=None)

    def refuse(self) -> IoError:
        """Why nothing can be done with the store."""
        says = "is closed; open another store"
        if os.getpid() != self.pid:
            says = (
                f"belongs to process {self.pid}, from which this one was forked; only that one may use it. "
                "Open a store of another folder in this process"
            )
        return IoError(f"the store of {self.folder} {says}", path=str(self.folder), errno=errno.EBADF)
