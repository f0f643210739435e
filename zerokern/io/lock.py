"""Locks a folder for one job: the lock ends with its owner, and a forked child does not inherit it."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from zerokern.core.errors import IoError
from zerokern.io.advice import file_error, refused

__all__ = ["FolderLock", "Use", "let_go_in_child"]

NAME = "zerokern.lock"
LINGER_S = 10.0
LOOK_S = 0.005
_log = logging.getLogger("zerokern.io")


class Inherited(Protocol):
    def let_go(self) -> None: ...


# A child of a fork shares the parent's open files, and with them its lock: it would hold the lock after the parent's
# death. Python can only tell all children at once, so what they must let go of is known here, weakly.
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def let_go_in_child(one: Inherited) -> None:
    """Calls ``one.let_go()`` in every child that this process forks from now on."""
    _inherited.add(one)


def _after_fork_in_child() -> None:
    for one in list(_inherited):
        one.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Holder(NamedTuple):
    """The owner that a lock file names."""

    pid: str
    host: str
    since: str

    @classmethod
    def here(cls) -> Holder:
        return cls(str(os.getpid()), socket.gethostname(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @classmethod
    def of(cls, fd: int) -> Holder:
        try:
            words = os.pread(fd, 512, 0).decode(errors="replace").split()
        except OSError:
            words = []
        return cls(*[*words, "unknown", "unknown", "unknown"][:3])

    def words(self) -> str:
        return " ".join(self) + "\n"

    def lives(self) -> bool:
        """Returns False only if its process was on this host and has ended, even if nobody has reaped it yet."""
        if self.host != socket.gethostname() or not self.pid.isdigit():
            return True
        try:
            state = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return state not in (b"Z", b"X")

    def is_here(self) -> bool:
        """Returns whether it is this process."""
        return self.pid == str(os.getpid()) and self.host == socket.gethostname()

    def __str__(self) -> str:
        if self.is_here():
            return f"this process (pid {self.pid}) itself, since {self.since}"
        return f"the process with pid {self.pid} on {self.host}, since {self.since}"


class Use(NamedTuple):
    """What a folder is locked for: as errors call the folder and the one who has it, and what to do where it is in use.

    `mine`: what to do where this very process has it.
    """

    folder: str = "the folder"
    user: str = "a store"
    advice: str = (
        ". A folder belongs to one store at a time: close that one (store.close(), or del of the optimizer or model "
        "that has it), or give each its own folder. Ranks may share one zk.Nvme path, and so may a model and its "
        "optimizer; every other optimizer needs its own folder"
    )
    mine: str = ""


class FolderLock:
    """An flock on ``zerokern.lock``; the file says who holds it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = FolderLock(Path(folder))
    ...     holder = (Path(folder) / "zerokern.lock").read_text().split()[0]
    ...     lock.release()
    >>> holder == str(os.getpid())
    True
    """

    def __init__(self, folder: Path, use: Use | None = None) -> None:
        self.path, self._use = folder / NAME, use or Use()
        self.fd = self.folder_fd = -1
        try:
            self.folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._take()
            self._lock_folder()
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, Holder.here().words().encode(), 0)
        except BaseException as error:
            taken = self.fd >= 0
            with suppress(OSError):
                self.release() if taken else self.let_go()
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        let_go_in_child(self)

    def _take(self) -> None:
        """Locks the lock file, which is made if it is missing. What is in the folder is opened relative to it."""
        collections = 3  # what autograd's nodes hold is found one by one
        until = time.monotonic() + LINGER_S
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            fd = self._opened(flags)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The one before removed its file when it let go: what is locked then is no longer the folder's lock.
                if self._is_there(fd):
                    self.fd = fd
                    return
                os.close(fd)
                continue
            except OSError as error:
                holder = Holder.of(fd)
                os.close(fd)
                if holder.is_here() and collections:  # perhaps by a store in a cycle that nobody refers to any more
                    gc.collect()
                    collections -= 1
                    continue
                if error.errno != errno.EWOULDBLOCK:
                    raise
                # The kernel keeps the lock of a process that was killed until its last transfer has ended.
                if holder.lives() or time.monotonic() > until:
                    raise self._refusal(holder) from None
            time.sleep(LOOK_S)

    def _opened(self, flags: int) -> int:
        fd = os.open(NAME, flags, 0o600, dir_fd=self.folder_fd)
        if os.fstat(fd).st_nlink > 1:  # what is written into it would be written into another file
            os.close(fd)
            raise file_error(
                self.path,
                "is another file's second name, which somebody who may write to the folder has put there; "
                "nothing was written: remove it",
                errno.EMLINK,
            )
        return fd

    def _lock_folder(self) -> None:
        """Locks the folder itself too: nobody removes it under a store, as a cleaner may remove the file."""
        try:
            fcntl.flock(self.folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems lock no folders: then there is the file's lock alone.
            if error.errno == errno.EWOULDBLOCK:
                raise self._refusal(f"{self._use.user} whose zerokern.lock somebody has removed") from None

    def _is_there(self, fd: int) -> bool:
        ours = os.fstat(fd)
        try:
            there = os.stat(NAME, dir_fd=self.folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def _refused(self, error: OSError) -> IoError:
        """Returns the error for what the system says about the lock file, with what to do."""
        do = ""
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            do = "this file system has no flock(), which keeps two jobs apart: choose a folder on a local disk"
        elif error.errno in (errno.EACCES, errno.EPERM):
            with suppress(OSError):
                owner = os.stat(self.path, follow_symlinks=False).st_uid
                if owner != os.geteuid():
                    do = f"user {owner} left it there: give each user a folder, or let that user remove the file"
        elif error.errno == errno.ELOOP:
            do = "it is a symbolic link, which is not followed: remove it"
        if not do:
            return refused(error, self.path.parent, f"Locking {NAME}")
        number = error.errno or 0
        code = errno.errorcode.get(number, number)
        return file_error(self.path, f"cannot be locked: {os.strerror(number)} ({code}); {do}", number)

    def _refusal(self, holder: Holder | str) -> IoError:
        use = self._use
        advice = (use.mine if isinstance(holder, Holder) and holder.is_here() else "") or use.advice
        says = f"{use.folder} {self.path.parent} is in use by {holder}{advice}"
        return IoError(says, path=str(self.path), errno=errno.EWOULDBLOCK)

    def release(self) -> None:
        """Removes the file while it is locked, then unlocks it. A file that stays locks nothing: that is no error."""
        if self.fd >= 0:
            try:
                if self._is_there(self.fd):
                    with suppress(FileNotFoundError):
                        os.unlink(NAME, dir_fd=self.folder_fd)
            except OSError as error:
                _log.warning("%s stays behind, unlocked: %s", self.path, error)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Closes the files, as in a child, where the lock stays the parent's."""
        fds, self.fd, self.folder_fd = (self.folder_fd, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
