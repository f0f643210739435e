"""A checkpoint's folder: what it holds, what could be loaded instead, and how a new checkpoint replaces the old one.

A new checkpoint is published by one rename, or not at all. The order makes a kill at any point safe: data files, both
indices (under temporary names) and the folder are synced; then ``zerokern.json`` is renamed into place, then
``.metadata``, the folder is synced, and only then the old data files are removed.
"""

from __future__ import annotations

import calendar
import errno
import hashlib
import logging
import os
import re
import resource
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zerokern.checkpoint.index import NAME, SAVE_ID, FileRow, Index, file_error
from zerokern.core.errors import BudgetError, IoError
from zerokern.io.advice import refused, refusing
from zerokern.io.files import free_nbytes, make_folder, sync_folder
from zerokern.io.lock import FolderLock, Holder, Use
from zerokern.io.renaming import Folder
from zerokern.memory.room import amount

__all__ = [
    "DATA", "LOCK", "METADATA", "Draft", "OpenFiles", "describe_unfinished", "fingerprint", "latest", "leftovers",
    "list_files", "read_published", "saved_at",
]  # fmt: skip

METADATA = ".metadata"  # torch's name for its own index
LOCK = "zerokern.lock"
DATA = re.compile(rf"({SAVE_ID})_\d+\.distcp")  # a data file of ours
ID_WITHIN = re.compile(rb'^\{"save_id":"(%b)"' % SAVE_ID.encode(), re.MULTILINE)  # in an index, at its beginning
HEAD = 256  # bytes of an index that have its id
NEW = re.compile(rf"{re.escape(NAME)}\.new|\.metadata\.({SAVE_ID})\.new")
SAMPLES, SAMPLE = 64, 4096  # how many places of some files are compared, and how many bytes of each
APPEARS_S = 10.0  # a network file system shows a new name to other hosts when its cache allows
MARGIN_NBYTES = 1 << 20  # for the indices, whose length is not known before
FREEING = "zerokern frees what a checkpoint took"
USE = Use(
    "the checkpoint folder",
    "a save",
    "; two jobs must not save into one folder: wait for that one, or choose another folder",
    "; the save before this one has not ended: call wait() of what it returned",
)

_log = logging.getLogger("zerokern.checkpoint")


class OpenFiles:
    """Files that stay open, so that a later save which reuses their names changes nothing for the reader.

    `tables`: the checksum tables that were read from them.
    """

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self.tables: dict[Path, array[int]] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # the other half is the program's

    def fd(self, path: Path) -> int | None:
        """Returns a file descriptor that stays open as long as this object; None if too many are open already."""
        if path not in self._fds:
            if len(self._fds) >= self._most:
                return None
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]

    def holds(self, path: Path) -> bool:
        """Returns whether the file stays open."""
        return path in self._fds

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """Context manager that yields a file descriptor."""
        kept = self.fd(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if kept is None else kept
        try:
            yield fd
        finally:
            if kept is None:
                os.close(fd)

    def fingerprint(self) -> str:
        """Returns the `fingerprint` of the files that are open."""
        return fingerprint(self._fds, self._fds.values())

    def close(self) -> None:
        """Closes all files."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def fingerprint(files: Iterable[Path], fds: Iterable[int] | None = None) -> str:
    """Returns a digest that is the same on two ranks if their files of these names are the same.

    The digest covers lengths and samples: checkpoints of two steps have the same headers, and differ nearly everywhere
    else. `fds`: open descriptors of the files.
    """
    paths = list(files)
    opened: list[Path | int] = list(paths if fds is None else fds)
    sizes = [os.stat(source).st_size for source in opened]
    made, begin = hashlib.sha256(), 0
    step = max(SAMPLE, sum(sizes) // SAMPLES)
    for path, source, size in zip(paths, opened, sizes, strict=True):
        made.update(f"{path.name} {size}\n".encode())
        mine = range(-begin % step, size, step)
        if mine:
            with open(source, "rb", buffering=0, closefd=isinstance(source, Path)) as file:
                for at in mine:
                    made.update(os.pread(file.fileno(), SAMPLE, at))
        begin += size
    return made.hexdigest()[:16]


def saved_at(save_id: str) -> float:
    """Returns when a save began, in seconds since 1970.

    >>> saved_at("20261122T070024-8000c3")
    1795330824.5
    """
    second, _, digits = save_id.partition("-")
    return calendar.timegm(time.strptime(second, "%Y%m%dT%H%M%S")) + int(digits[:4], 16) / 65536


def _new_save_id() -> str:
    """Returns an id that no other save has: the second, 65536ths of it, so that ids are in the order of saves, and a
    random number."""
    now = time.time_ns()
    part = (now % 10**9 << 16) // 10**9
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now // 10**9))}-{part:04x}{secrets.token_hex(1)}"


def list_files(folder: Path) -> list[Path]:
    """Lists the content of a folder by name; an empty list if there is no folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_published(folder: Path, files: OpenFiles | None = None) -> Index:
    """Returns the index of a published checkpoint, whose data files are there, with the lengths that the index says.

    `files` keeps them open from here on, whatever is saved into the folder meanwhile. The error says what is there, and
    what could be loaded instead.
    """
    index = _read(folder)
    while broken := _length_errors(folder, index, files):
        if files is not None:
            files.close()
        # A save may have replaced the checkpoint meanwhile: then there is another index now.
        newer = _read(folder)
        if newer.save_id == index.save_id:
            raise IoError(
                f"{folder} is not whole: {broken}. {_suggest_other(folder)}",
                path=str(folder / index.files[0].name),
                errno=errno.ENODATA,
            )
        index = newer
    return index


def latest(run: str | os.PathLike[str]) -> Path | None:
    """Finds the newest complete checkpoint among the folders within `run`; None if there is none.

    The newest is the one whose save began last, as checkpoints say themselves: copies of them may have any file times.
    Newer ones that are damaged (an index that cannot be read, files that are missing or have another length) or were
    never published are skipped, with a warning in the log that says why. Checksums are compared by `zk.load`.

    >>> import tempfile, torch, zerokern as zk
    >>> with tempfile.TemporaryDirectory() as run:
    ...     zk.latest(run)
    ...     zk.save(f"{run}/step-1", torch.nn.Linear(2, 2))
    ...     zk.latest(run).name
    'step-1'
    """
    return _newest(Path(run), lambda folder, why: _log.warning("%s is skipped: %s", folder, why))


def _newest(run: Path, skip: Callable[[Path, str], None] = lambda folder, why: None) -> Path | None:
    """Returns the newest complete checkpoint within the folder; `skip` is called for newer ones that are none."""
    ages: list[tuple[float, int, Path]] = []
    for child in filter(Path.is_dir, list_files(run)):
        with suppress(OSError):  # gone meanwhile
            place = child / NAME
            changed = (place if place.exists() else child).stat().st_mtime_ns
            save_id = _id_of(child)
            ages.append((saved_at(save_id) if save_id else changed / 1e9, changed, child))
    for _, _, folder in sorted(ages, reverse=True):
        if not (folder / NAME).exists():
            if unfinished := describe_unfinished(folder):
                skip(folder, unfinished)
            continue
        try:
            wrong = _length_errors(folder, Index.load((folder / NAME).read_bytes(), folder / NAME))
        except (OSError, IoError) as error:
            wrong = str(error)
        if not wrong:
            return folder
        skip(folder, wrong)
    return None


def _id_of(folder: Path) -> str:
    """Returns the id of a folder's checkpoint, else of its last save; "" where nothing says one. Nothing is checked."""
    with suppress(OSError), open(folder / NAME, "rb") as file:
        if match := ID_WITHIN.search(file.read(HEAD)):
            return match[1].decode()
    return max(_save_ids(folder), default="")


def _save_ids(folder: Path) -> list[str]:
    """Returns the ids of the saves that data files in the folder are of."""
    return [match[1] for path in list_files(folder) if (match := DATA.fullmatch(path.name))]


def leftovers(folder: Path, keep: Index | None) -> list[Path]:
    """Lists data files and indices that the index does not name: from saves that never finished, or were replaced."""
    kept = {file.name for file in keep.files} if keep else set()
    names = (path for path in list_files(folder) if path.name not in kept)
    return [path for path in names if DATA.fullmatch(path.name) or NEW.fullmatch(path.name)]


def describe_unfinished(folder: Path) -> str:
    """Describes an unfinished save into the folder in words; returns "" if there is none."""
    ids = _save_ids(folder)
    if not ids and not (folder / LOCK).exists():
        return ""
    since = time.strftime(" of %Y-%m-%d %H:%M:%S UTC", time.gmtime(saved_at(max(ids)))) if ids else ""
    holder = _holder(folder)
    return f"a save{since} {f'is being written by {holder}' if holder else 'was begun and never published'}"


def _holder(folder: Path) -> Holder | None:
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = Holder.of(fd)
    finally:
        os.close(fd)
    return holder if holder.pid.isdigit() and holder.lives() else None


def _length_errors(folder: Path, index: Index, files: OpenFiles | None = None) -> str:
    """Describes data files that are missing or have another length; `files` keeps them open from here on."""
    return "; ".join(filter(None, (_length_error(folder / file.name, file, files) for file in index.files)))


def _length_error(path: Path, file: FileRow, files: OpenFiles | None) -> str:
    try:
        fd = None if files is None else files.fd(path)
        nbytes = os.stat(path if fd is None else fd).st_size
    except FileNotFoundError:
        return f"{file.name}, {amount(file.nbytes)}, is missing"
    if nbytes == file.nbytes:
        return ""
    how = "truncated" if nbytes < file.nbytes else "longer than it was"
    return f"{file.name} is {how}: it has {nbytes:,} bytes, {file.nbytes:,} were written"


def _read(folder: Path) -> Index:
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_checkpoint(folder) from None
    except OSError as error:
        raise refused(error, folder, "Loading") from error
    return Index.load(data, folder / NAME)


def _no_checkpoint(folder: Path) -> IoError:
    """Returns the error that says what the folder holds, and what could be loaded instead."""
    number = errno.ENOENT
    if not folder.exists():
        says = "does not exist"
    elif not folder.is_dir():
        says, number = "is a file, no folder of a checkpoint", errno.ENOTDIR
    elif what := describe_unfinished(folder):
        says = f"holds no published checkpoint: {what}, and is ignored"
    else:
        names = [path.name for path in list_files(folder)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        says = f"is no checkpoint: there is no {NAME} in it, but {shown or 'nothing at all'}"
    return file_error(folder, f"{says}. {_suggest_other(folder)}", number)


def _suggest_other(folder: Path) -> str:
    below = _newest(folder) if folder.is_dir() else None
    if below is not None:
        return f"The newest checkpoint within it is {below}: load that"
    beside = _newest(folder.parent) if folder.parent.is_dir() else None
    if beside is not None and beside != folder:
        return f"The newest published checkpoint beside it is {beside}: load that"
    return "No other checkpoint was ever published in it or beside it"


class Draft:
    """A checkpoint that is being written. Rank 0 begins it, the others join it, rank 0 publishes or abandons it."""

    def __init__(self, folder: Path, save_id: str, rank: int, lock: FolderLock | None, made: bool = False) -> None:
        self.folder, self.save_id, self.rank = folder, save_id, rank
        self._lock, self._made = lock, made
        self._unnamed: list[int] = []  # open files without a name

    @classmethod
    def begin(cls, path: str | os.PathLike[str], nbytes: int) -> Draft:
        """Locks the folder for a save of nbytes by all ranks. Raises before anything in it changes."""
        folder = Path(path)
        save_id = _new_save_id()
        with refusing(folder, "Saving"):
            draft = cls(folder, save_id, 0, None, make_folder(folder))
            try:
                draft._lock = FolderLock(folder, USE)
                before = _previous_index(folder)
                _finish_renames(folder, before)
                if left := leftovers(folder, before):
                    sync_folder(folder)  # the rename that made them leftovers may be in memory only
                    for path in left:
                        os.unlink(path)
                for thread in threading.enumerate():  # what this process has removed counts as free
                    if thread.name == FREEING:
                        thread.join()
                _refuse_beyond_free(folder, nbytes, before)
            except BaseException:
                draft._release()
                raise
        return draft

    @classmethod
    def join(cls, path: str | os.PathLike[str], save_id: str, rank: int) -> Draft:
        """Returns the same draft on another rank, which waits until it sees the folder that rank 0 locked."""
        folder = Path(path)
        until = time.monotonic() + APPEARS_S
        while True:
            with refusing(folder, "Saving"):
                if (folder / LOCK).exists():
                    return cls(folder, save_id, rank, None)
            if time.monotonic() > until:
                raise IoError(
                    f"rank {rank} does not see {folder} as rank 0 made it: there is no {LOCK} in it. All ranks save "
                    "into one folder: choose one on a file system that every host mounts, under the same path",
                    path=str(folder),
                    errno=errno.ENOENT,
                )
            time.sleep(0.05)

    def file(self, rank: int) -> Path:
        """Returns the path of a rank's data file."""
        return self.folder / f"{self.save_id}_{rank}.distcp"

    def publish(self, index: Index, metadata: bytes) -> None:
        """Makes this the folder's checkpoint. All files that `index` names must be written and synced already."""
        if self._lock is None:
            raise ValueError(f"rank {self.rank} joined this draft, or it has ended; only rank 0 publishes, and once")
        if broken := _length_errors(self.folder, index):
            raise file_error(self.folder, f"is not published: {broken}. The one before it is untouched: save again")
        new_index, new_metadata = f"{NAME}.new", f"{METADATA}.{self.save_id}.new"
        with refusing(self.folder, "Publishing the checkpoint"), Folder(self.folder) as folder:
            folder.write(new_metadata, metadata)
            folder.write(new_index, index.dump())
            folder.rename((new_index, NAME), (new_metadata, METADATA))
        self._remove(leftovers(self.folder, index))
        self._release()

    def abandon(self) -> None:
        """Removes what was written of the draft. Does nothing after ``publish``, and on ranks other than 0."""
        if self._lock is None:
            return
        # Read the state from disk: an error may have come after the rename.
        try:
            published = _previous_index(self.folder)
            _finish_renames(self.folder, published)
            self._remove(leftovers(self.folder, published))
        except OSError as error:
            _log.warning("%s: what an abandoned save wrote stays for the next one to remove: %s", self.folder, error)
        finally:
            self._release()

    def _remove(self, paths: list[Path]) -> None:
        """Removes files. Failing to is no reason to fail this save: the next one tries again."""
        for path in paths:
            try:
                self._unnamed.append(_unlink(path))
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("%s stays behind: %s; the next save into its folder removes it", path, error)

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        try:
            if lock is not None:
                lock.release()
            if self._made:
                with suppress(OSError):  # somebody has put a file of his own into it, or it is published
                    os.rmdir(self.folder)
        finally:  # last: while blocks are freed, even closing the lock waits for the file system's journal
            while self._unnamed:
                threading.Thread(target=os.close, args=(self._unnamed.pop(),), name=FREEING).start()


def _unlink(path: Path) -> int:
    """Removes a file's name and returns a descriptor of the file.

    The file's blocks are freed when the descriptor is closed, which takes a quarter of a second per GB and so belongs
    in the background.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _previous_index(folder: Path) -> Index | None:
    """Reads the index of the checkpoint that a save will replace; refuses a folder that this library did not write."""
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
        says = f"{error}. Nothing is saved over it: save into another folder, or remove that one"
        raise IoError(says, path=error.path, errno=error.errno) from error


def _finish_renames(folder: Path, index: Index | None) -> None:
    """Finishes the second rename of a publication that was killed, before the files that the old index names are
    removed."""
    if index is not None:
        new = f"{METADATA}.{index.save_id}.new"
        if (folder / new).exists():
            with Folder(folder) as there:
                there.rename((new, METADATA))


def _refuse_beyond_free(folder: Path, nbytes: int, before: Index | None) -> None:
    free = free_nbytes(folder)
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
