"""A store's lock, engine, files and transfers: opened in order, closed in reverse."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerokern.core.errors import IoError
from zerokern.io import index
from zerokern.io.advice import refusing
from zerokern.io.engine import Engine, Faults
from zerokern.io.files import Files, make_folder, remains
from zerokern.io.lock import FolderLock, let_go_in_child
from zerokern.io.probing import settings
from zerokern.io.space import Extent, Space
from zerokern.io.ticket import Transfers, again

if TYPE_CHECKING:
    from zerokern.memory import Arena

__all__ = ["Belongings"]

_log = logging.getLogger("zerokern.io")


class Belongings:
    """Everything of a store that must be closed, apart from the store itself: a finalizer may hold it."""

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
        with refusing(folder, "A store"):
            make_folder(folder, 0o700)
            self.lock = FolderLock(folder)
            try:
                self.entries = self._published()
                self._clear(keep=self._names)
                depth, block = settings(folder, depth, block)
                self.engine = Engine(engine, depth=depth, block=block, faults=faults)
            except BaseException:
                self.lock.release()
                raise
            self.files = Files(folder, self.engine, place=self.lock.folder_fd, named=durable)
            try:
                # The kernel lets go of a killed ring's files when its last transfer has ended. With the lock among them
                # no other process takes the folder while a write may still land in it.
                self._lock_number = self.engine.file(self.lock.fd, 1, 1)
                self._reopen()
                self.space = Space(self.files, budget, self._extents)
                self.transfers = Transfers(self.engine, self.files.paths)
                if arena is not None:
                    # The ring goes on moving these very pages, which an arena that is closed meanwhile must not free.
                    self._pages = arena.view_at(arena.base, torch.uint8, arena.nbytes)
                    if self.engine.register(arena):
                        self._registered = arena
            except BaseException:
                self._let_go_of_files()
                raise
        self.open = True
        let_go_in_child(self)

    @property
    def _extents(self) -> list[Extent]:
        return [entry.extent for entry in self.entries if entry.extent is not None]

    def _published(self) -> list[index.Entry]:
        """Returns the entries of a durable store that was here before."""
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
        for entry in self.entries:
            self._check_length(entry)
        if any(entry.lost for entry in self.entries):
            self.publish(self.entries)
        for extent in self._extents:
            file, end = self.files.all[extent.file], extent.offset + extent.nbytes
            if file.nbytes < end:
                self.files.lengthen(file, end)

    def _check_length(self, entry: index.Entry) -> None:
        """Marks an entry as lost if its file ends before its bytes do."""
        if entry.extent is None:
            return
        file, offset = self.files.all[entry.extent.file], entry.extent.offset
        if offset + entry.nbytes > file.nbytes:
            entry.extent = None
            entry.lost = (
                f"{file.path} had {file.nbytes} bytes when it was opened, {entry.key!r} lies at offset {offset}, "
                f"{entry.nbytes} bytes: something has truncated the file"
            )

    def publish(self, entries: list[index.Entry]) -> None:
        """Makes these entries the state that a reopened store begins with."""
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
        with refusing(self.folder, "Publishing the index"):
            index.publish(self.folder, self._names, entries)
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
        """Closes a store that nobody has closed, and logs what nobody was told."""
        if not self.open:
            return
        if self.durable and self.unpublished:
            _log.warning("%s: not closed; what was put since the last sync() is not kept", self.folder)
        self.close()
        for ticket in self.transfers.untold:
            _log.error("%s: not closed, and nobody was told: %s", self.folder, ticket._failure)

    def let_go(self) -> None:
        """Forgets all of it in a forked child: it stays the parent's."""
        if self.open:
            self.open = False
            self.transfers.let_go()
            self.engine.close()
            self.files.close(keep=None)

    def check(self) -> None:
        """Raises IoError if the store is closed, or belongs to another process."""
        if self.open:
            return
        says = "is closed; open another store"
        if os.getpid() != self.pid:
            says = (
                f"belongs to process {self.pid}, from which this one was forked; only that one may use it. "
                "Open a store of another folder in this process"
            )
        raise IoError(f"the store of {self.folder} {says}", path=str(self.folder), errno=errno.EBADF)
