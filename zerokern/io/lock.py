"""One job per folder: a lock that dies with its owner, and what a fork must let go of."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import time
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol

from zerokern.core.errors import IoError

__all__ = ["FolderLock", "let_go_in_child"]

NAME = "zerokern.lock"
LINGER_S = 10.0
LOOK_S = 0.005


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
    """What the lock file says of its owner."""

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
        """False only where its process was on this host and is gone, if perhaps nobody has asked for its end yet."""
        if self.host != socket.gethostname() or not self.pid.isdigit():
            return True
        try:
            state = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return state not in (b"Z", b"X")

    def is_here(self) -> bool:
        """Whether it is this very process."""
        return self.pid == str(os.getpid()) and self.host == socket.gethostname()

    def __str__(self) -> str:
        if self.is_here():
            return f"this process (pid {self.pid}) itself, since {self.since}"
        return f"the process with pid {self.pid} on {self.host}, since {self.since}"


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

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.folder_fd = -1
        collected = False
        until = time.monotonic() + LINGER_S
        while True:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The one before removed its file when it let go: what is locked then is no longer the folder's lock.
                if self._still_there():
                    break
            except OSError as error:
                holder = Holder.of(self.fd)
                if holder.is_here() and not collected:  # perhaps by a store in a cycle that nobody refers to any more
                    os.close(self.fd)
                    gc.collect()
                    collected = True
                    continue
                if error.errno != errno.EWOULDBLOCK:
                    os.close(self.fd)
                    raise
                # The kernel keeps the lock of a process that was killed until its last transfer has ended.
                if holder.lives() or time.monotonic() > until:
                    os.close(self.fd)
                    raise self._refusal(holder) from None
                time.sleep(LOOK_S)
            os.close(self.fd)
        try:
            self._lock_folder(folder)
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, Holder.here().words().encode(), 0)
        except BaseException:
            self.release()
            raise
        let_go_in_child(self)

    def _lock_folder(self, folder: Path) -> None:
        """Locks the folder itself too: nobody removes it under a store, as a cleaner may remove the file."""
        self.folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self.folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems lock no folders: then there is the file's lock alone.
            if error.errno == errno.EWOULDBLOCK:
                raise self._refusal("a store whose zerokern.lock somebody has removed") from None

    def _still_there(self) -> bool:
        ours = os.fstat(self.fd)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def _refusal(self, holder: Holder | str) -> IoError:
        return IoError(
            f"the folder {self.path.parent} is in use by {holder}. A folder belongs to one store at a time: "
            "close that one, or give each its own folder (one per rank: f'{path}/rank{rank}')",
            path=str(self.path),
            errno=errno.EWOULDBLOCK,
        )

    def release(self) -> None:
        """Removes the file while it is locked, then lets go."""
        if self.fd >= 0:
            try:
                if self._still_there():
                    self.path.unlink(missing_ok=True)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """In a child: the lock stays the parent's."""
        fds, self.fd, self.folder_fd = (self.folder_fd, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
