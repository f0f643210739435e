"""Makes, allocates, reopens, syncs and removes the large files of a store, with O_DIRECT where there is any."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zerokern.core import native
from zerokern.core.errors import BudgetError, say_once
from zerokern.io.advice import because, file_error, refused, refusing
from zerokern.io.engine import Engine
from zerokern.io.renaming import Folder
from zerokern.memory.room import amount

__all__ = [
    "File", "Files", "alignment", "fallocate", "free_nbytes", "go_direct", "make_folder", "refuse_beyond_free",
    "refuse_unusable", "register_file", "remains", "reserve", "sync_folder",
]  # fmt: skip

OURS = re.compile(r"zerokern\.\d+\.data|zerokern\.index\.new")
MOST_ALIGN = 1 << 16  # of the engine
TRIED = (1, 512, 4096)
NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class File:
    """One open file. `number` is the engine's."""

    path: Path
    fd: int
    nbytes: int
    number: int = -1
    direct: bool = False


def remains(folder: Path) -> list[Path]:
    """Lists files of a store that nobody may have asked to keep: data, and an index that was never published."""
    return sorted(path for path in folder.iterdir() if OURS.fullmatch(path.name))


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder."""
    with Folder(folder) as one:
        one.sync()


def make_folder(folder: Path, mode: int = 0o777) -> bool:
    """Makes a folder and those above it, synced; returns False if it was there."""
    if folder.is_dir():
        return False
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(one, mode if one == folder else 0o777)
        sync_folder(one.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return True


def alignment(fd: int, folder: Path) -> tuple[int, int]:
    """Returns the alignments that O_DIRECT needs, of memory and of offsets in this file; (0, 0) without O_DIRECT.

    The kernel says so; where it cannot (before Linux 6.1, on tmpfs), transfers to another file of the folder are tried.
    """
    memory, offset = ctypes.c_uint32(), ctypes.c_uint32()
    refusal = native.library().zk_io_alignment(fd, ctypes.byref(memory), ctypes.byref(offset))
    if refusal == errno.ENOTSUP:
        with unnamed_file(folder) as other:
            return _tried_alignment(other)
    if refusal or max(memory.value, offset.value) > MOST_ALIGN:
        return 0, 0
    return memory.value, offset.value


def _tried_alignment(fd: int) -> tuple[int, int]:
    os.pwrite(fd, bytes(2 * max(TRIED)), 0)
    os.fsync(fd)  # of what was never written any part can be read
    if not _switch_direct(fd, True):
        return 0, 0
    with mmap.mmap(-1, max(TRIED)) as page, memoryview(page) as memory:
        for align in TRIED:
            try:
                with memory[:align] as part:
                    os.preadv(fd, [part], align)
            except OSError:
                continue
            # tmpfs takes the flag and goes through memory all the same: it has no rules to break
            return (align, align) if align > 1 else (0, 0)
    return 0, 0


@contextmanager
def unnamed_file(folder: Path) -> Iterator[int]:
    """Context manager that opens an empty file, which is gone when it is closed, however this process ends."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        path = folder / f"zerokern.unnamed-{os.getpid()}-{time.monotonic_ns()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        path.unlink()
    try:
        yield fd
    finally:
        os.close(fd)


def go_direct(fd: int, folder: Path) -> tuple[int, int]:
    """Switches O_DIRECT on; returns the alignments of memory and offsets. (1, 1): there is none, transfers are
    buffered."""
    memory_align, offset_align = alignment(fd, folder)
    if offset_align and _switch_direct(fd, True):
        return memory_align, offset_align
    _switch_direct(fd, False)
    return 1, 1


def register_file(engine: Engine, fd: int, folder: Path, what: str) -> tuple[int, int]:
    """Registers an open file with the engine, past the page cache if possible. Returns its number, and the alignment of
    offsets. `what` goes through the page cache otherwise, for the log."""
    memory_align, offset_align = go_direct(fd, folder)
    if offset_align == 1:
        say_once("zerokern.io", f"{folder}: this file system has no O_DIRECT; {what} go through the page cache")
    return engine.file(fd, memory_align, offset_align), offset_align


def _switch_direct(fd: int, on: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Makes the system call. Where there is none, posix_fallocate of the C library would write to every block."""
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        if ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reserve(fd: int, nbytes: int) -> None:
    """Allocates the first bytes of a file, which then has that length; sets only the length without fallocate."""
    try:
        fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        os.ftruncate(fd, nbytes)


class Files:
    """The files of a store by number, from 0, allocated before use, so that the disk does not run out later."""

    def __init__(self, folder: Path, engine: Engine, *, place: int, named: bool) -> None:
        """`place`: the folder, open, which may be renamed meanwhile. Not `named`: they are gone when the process is."""
        self.folder = folder
        self._place, self._named = place, named
        self._engine = engine
        self.all: list[File] = []
        self.paths: dict[int, str] = {}  # by the engine's number
        self.offset_align = 1
        self._reserves = True

    @property
    def direct(self) -> bool:
        """Whether all of them bypass the page cache."""
        return all(file.direct for file in self.all)

    def make(self, nbytes: int) -> File:
        """Makes a file of that length."""
        path = self.folder / f"zerokern.{len(self.all)}.data"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path.name, flags, 0o600, dir_fd=self._place)
        try:
            if not self._named:
                os.unlink(path.name, dir_fd=self._place)  # before it takes any room
            self._allocate(fd, 0, nbytes)
            return self._enter(File(path, fd, nbytes))
        except BaseException:
            os.close(fd)
            if self._named:
                self._remove(path)
            raise

    def _remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=self._place)

    def reopen(self, name: str) -> File:
        """Opens a file of a durable store."""
        path = self.folder / name
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self._enter(File(path, fd, os.fstat(fd).st_size))
        except BaseException:
            os.close(fd)
            raise

    def lengthen(self, file: File, nbytes: int) -> None:
        """Makes a file longer; a failure leaves it as it was."""
        found = os.fstat(file.fd).st_size
        if found < file.nbytes:  # what would be added now reads as zeros where somebody's data were
            raise file_error(
                file.path,
                f"has {found} bytes, {file.nbytes} were there: something has truncated it. "
                "Keys in the part that is gone are lost; put them into another store",
                errno.ENODATA, offset=found, nbytes=file.nbytes - found,
            )  # fmt: skip
        self._allocate(file.fd, file.nbytes, nbytes - file.nbytes)
        file.nbytes = nbytes

    def _allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if self._reserves and nbytes:
            try:
                fallocate(fd, offset, nbytes)
                return
            except OSError as error:
                # Not all of it may have been granted; what was is given back with the length.
                os.ftruncate(fd, offset)
                if error.errno not in NO_FALLOCATE:
                    raise
                self._reserves = False
                say_once(
                    "zerokern.io",
                    f"{self.folder}: this file system has no fallocate; that it is full shows when it is written to",
                )
        os.ftruncate(fd, offset + nbytes)

    def _enter(self, file: File) -> File:
        file.number, offset_align = register_file(self._engine, file.fd, self.folder, "transfers")
        file.direct = offset_align > 1
        self.paths[file.number] = str(file.path)
        self.offset_align = max(self.offset_align, offset_align)
        self.all.append(file)
        return file

    def sync(self) -> None:
        """Syncs all files."""
        for file in self.all:
            with refusing(self.folder, "Syncing", path=file.path, nbytes=file.nbytes):
                os.fdatasync(file.fd)

    def close(self, keep: list[str] | None) -> None:
        """Closes the files and removes all but those to keep. None: they belong to another process."""
        files, self.all = self.all, []
        failed: OSError | None = None
        for file in files:
            if keep is not None:
                self._engine.forget_file(file.number)
            os.close(file.fd)
            if self._named and keep is not None and file.path.name not in keep:
                try:
                    self._remove(file.path)
                except OSError as error:
                    failed = failed or error
        if failed is not None:
            raise refused(failed, self.folder, "Removing the store's files")


def refuse_unusable(folder: Path, budget: int | None) -> None:
    """Raises where a folder can be neither written nor made, or its file system is smaller than the budget.

    >>> refuse_unusable(Path("/nowhere/swap"), None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.IoError: /nowhere/swap cannot be made: there is no folder /nowhere. Make it, or correct...
    """
    there = folder if os.path.lexists(folder) else folder.parent
    number = 0
    try:
        found = os.statvfs(there)
        if not there.is_dir():
            number = errno.ENOTDIR
        elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
            number = errno.EROFS if found.f_flag & os.ST_RDONLY else errno.EACCES
    except OSError as error:
        number = error.errno or errno.EIO
    if number == errno.ENOENT and there is not folder:
        raise file_error(folder, f"cannot be made: there is no folder {there}. Make it, or correct the path", number)
    if number:
        made = "written to" if there is folder else f"made in {there}"
        raise file_error(folder, f"cannot be {made}: {because(number)}", number)
    size = found.f_blocks * found.f_frsize
    if budget is not None and 0 < size < budget:  # some file systems do not say
        raise BudgetError(
            f"budget={amount(budget)} does not fit on the file system of {there}, which has {amount(size)} in all; "
            "ask for less, or choose another disk"
        )


def free_nbytes(folder: Path) -> int:
    """Returns the bytes that a user may still write on the file system of a folder."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def refuse_beyond_free(folder: Path, nbytes: int, budget: int, used: int) -> None:
    """Raises where a file system cannot give nbytes more, before any of it is taken."""
    free = free_nbytes(folder)
    if nbytes > free:
        raise BudgetError(
            f"budget={amount(budget)} does not fit on the file system of {folder}:\n"
            f"  {'asked for':<22}{amount(budget):>12}\n"
            f"  {'held by this store':<22}{amount(used):>12}\n"
            f"  {'free':<22}{amount(free):>12}\n"
            f"Ask for at most {amount(free + used)}, or free space"
        )
