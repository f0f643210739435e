"""A checkpoint that is being written: published whole by one rename, or not at all.

The order is what a kill at any point is safe by. Data files and both indices are synced under names that nobody reads,
the folder too; then ``zerokern.json`` is renamed into place, ``.metadata`` after it, the folder is synced, and only
then do the data files of the save before go."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from zerokern.checkpoint.index import NAME, Index, unfit
from zerokern.checkpoint.published import LOCK, METADATA, Published, data_name, latest, leftovers, why_broken
from zerokern.core.errors import BudgetError, IoError
from zerokern.io.advice import refused
from zerokern.io.files import make_folder, sync_folder
from zerokern.io.lock import FolderLock, Use
from zerokern.io.renaming import Folder
from zerokern.memory.room import amount

__all__ = ["Draft", "Published", "latest"]

FREEING = "zerokern frees what a checkpoint took"
APPEARS_S = 10.0  # a network file system shows a new name to other hosts when its cache allows
MARGIN_NBYTES = 1 << 20  # for the indices, whose length is not known before
USE = Use(
    "the checkpoint folder",
    "a save",
    "; two jobs must not save into one folder: wait for that one, or choose another folder",
    "; the save before this one has not ended: call wait() of what it returned",
)

_log = logging.getLogger("zerokern.checkpoint")


class Draft:
    """A checkpoint that is being written. Rank 0 begins it, the others join it, rank 0 publishes it or abandons it."""

    def __init__(self, folder: Path, save_id: str, rank: int, lock: FolderLock | None, made: bool = False) -> None:
        self.folder, self.save_id, self.rank = folder, save_id, rank
        self._lock, self._made = lock, made
        self._unnamed: list[int] = []  # open files without a name

    @classmethod
    def begin(cls, path: str | os.PathLike[str], nbytes: int) -> Draft:
        """Takes the folder for a save of nbytes, all ranks together; refuses before anything in it changes."""
        folder = Path(path)
        save_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        lock, made = None, False
        try:
            made = make_folder(folder)
            lock = FolderLock(folder, USE)
            before = _before(folder)
            _finish_renames(folder, before)
            if left := leftovers(folder, before):
                sync_folder(folder)  # the rename that made them leftovers may be in memory only
                for one in left:
                    os.unlink(one)
            _await_freed()
            _refuse_beyond_free(folder, nbytes, before)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if made:
                _remove_empty(folder)
            if isinstance(error, OSError):
                raise refused(error, folder, "Saving") from error
            raise
        return cls(folder, save_id, 0, lock, made)

    @classmethod
    def join(cls, path: str | os.PathLike[str], save_id: str, rank: int) -> Draft:
        """The same draft on another rank, which must see the folder that rank 0 took."""
        folder = Path(path)
        until = time.monotonic() + APPEARS_S
        while not _appeared(folder):
            if time.monotonic() > until:
                raise IoError(
                    f"rank {rank} does not see {folder} as rank 0 made it: there is no {LOCK} in it. All ranks save "
                    "into one folder: choose one on a file system that every host mounts, under the same path",
                    path=str(folder),
                    errno=errno.ENOENT,
                )
            time.sleep(0.05)
        return cls(folder, save_id, rank, None)

    def file(self, rank: int) -> Path:
        """Where a rank's data go."""
        return self.folder / data_name(self.save_id, rank)

    def publish(self, index: Index, metadata: bytes) -> None:
        """Makes this the checkpoint of the folder. Everything that `index` names must be written and synced already."""
        if self._lock is None:
            raise ValueError(f"rank {self.rank} joined this draft, or it has ended; only rank 0 publishes, and once")
        broken = [says for says in (why_broken(self.folder, file) for file in index.files) if says]
        if broken:
            raise unfit(
                self.folder, f"is not published: {'; '.join(broken)}. The one before it is untouched: save again"
            )
        new_index, new_metadata = f"{NAME}.new", f"{METADATA}.{self.save_id}.new"
        try:
            with Folder(self.folder) as folder:
                folder.write(new_metadata, metadata)
                folder.write(new_index, index.dump())
                folder.rename((new_index, NAME), (new_metadata, METADATA))
        except OSError as error:
            raise refused(error, self.folder, "Publishing the checkpoint") from error
        self._remove(leftovers(self.folder, index))
        self._let_go()

    def abandon(self) -> None:
        """Removes what was written of the draft. After ``publish``, and on other ranks than 0, it does nothing."""
        if self._lock is None:
            return
        # What is published is asked of the disk: an error may have come after the rename.
        try:
            published = _before(self.folder)
            _finish_renames(self.folder, published)
            self._remove(leftovers(self.folder, published))
        except OSError as error:
            _log.warning("%s: what an abandoned save wrote stays for the next one to remove: %s", self.folder, error)
        finally:
            self._let_go()

    def _remove(self, paths: list[Path]) -> None:
        """What stays is removed by the next save: no reason to fail this one."""
        for path in paths:
            try:
                self._unnamed.append(_unlink(path))
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("%s stays behind: %s; the next save into its folder removes it", path, error)

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        try:
            if lock is not None:
                lock.release()
            if self._made:
                _remove_empty(self.folder)
        finally:  # not before: meanwhile even closing the lock would wait for the file system's journal
            while self._unnamed:
                threading.Thread(target=os.close, args=(self._unnamed.pop(),), name=FREEING).start()


def _appeared(folder: Path) -> bool:
    try:
        return (folder / LOCK).exists()
    except OSError as error:
        raise refused(error, folder, "Saving") from error


def _unlink(path: Path) -> int:
    """The name is gone on return. What the file took is given back when the number returned is closed, which belongs
    into the background: a quarter of a second per GB, as much as writing it again may take."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _await_freed() -> None:
    """What this process has removed counts as free."""
    for thread in threading.enumerate():
        if thread.name == FREEING:
            thread.join()


def _remove_empty(folder: Path) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return  # somebody has put a file of his own into it


def _before(folder: Path) -> Index | None:
    """The checkpoint that a save will replace; refuses to touch what this library did not write, or cannot read."""
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError:
        if (folder / METADATA).exists():
            raise IoError(
                f"{folder} holds a checkpoint of torch.distributed.checkpoint ({METADATA}, no {NAME}); a save "
                "would make it unreadable. Save into another folder, or remove that one",
                path=str(folder / METADATA),
                errno=errno.EEXIST,
            ) from None
        return None
    try:
        return Index.load(data, folder / NAME)
    except IoError as error:
        raise IoError(
            f"{error}. Nothing is saved over it: save into another folder, or remove that one",
            path=error.path,
            errno=error.errno,
        ) from error


def _finish_renames(folder: Path, index: Index | None) -> None:
    """A kill between the two renames leaves torch's index of the older checkpoint, whose files are about to go."""
    if index is not None:
        new = f"{METADATA}.{index.save_id}.new"
        if (folder / new).exists():
            with Folder(folder) as there:
                there.rename((new, METADATA))


def _refuse_beyond_free(folder: Path, nbytes: int, before: Index | None) -> None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if nbytes + MARGIN_NBYTES <= free:
        return
    held = sum(file.nbytes for file in before.files) if before else 0
    kept = f"\n  {'the checkpoint there':<22}{amount(held):>12}   kept until the new one is published" if before else ""
    raise BudgetError(
        f"a checkpoint of {amount(nbytes)} does not fit on the file system of {folder}; nothing was written:\n"
        f"  {'asked for':<22}{amount(nbytes + MARGIN_NBYTES):>12}\n"
        f"  {'free':<22}{amount(free):>12}{kept}\n"
        "Remove older checkpoints, or save to another file system"
    )
