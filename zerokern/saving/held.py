"""Files that stay open from the time that they were looked at: who replaces them meanwhile takes their names alone."""

from __future__ import annotations

import hashlib
import os
import resource
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Held", "likeness"]

SAMPLES, SAMPLE = 64, 4096  # how many places of some files are compared, and how many bytes of each


class Held:
    """Descriptors by path. `tables` has checksums that were read from them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "a"); _ = path.write_text("old")
    ...     held = Held(); fd = held.fd(path)
    ...     path.unlink(); _ = path.write_text("new")
    ...     os.pread(held.fd(path), 3, 0); held.close()
    b'old'
    """

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self.tables: dict[Path, array[int]] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # the other half is the program's

    def fd(self, path: Path) -> int | None:
        """Of this file, open as long as this is; None where there are too many: then it is opened when it is read."""
        if path not in self._fds:
            if len(self._fds) >= self._most:
                return None
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """A descriptor of this file for the time of the block."""
        kept = self.fd(path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if kept is None else kept
        try:
            yield fd
        finally:
            if kept is None:
                os.close(fd)

    def likeness(self) -> str:
        """The same as of these paths, of the files that are held."""
        return likeness(self._fds, self._fds.values())

    def close(self) -> None:
        """Lets go of all of them."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def likeness(files: Iterable[Path], fds: Iterable[int] | None = None) -> str:
    """A digest that two ranks have in common where their files of these names do: of lengths, and of samples.

    Checkpoints of two steps have the same headers, and differ nearly everywhere else. `fds`: where they are open.
    """
    paths = list(files)
    opened: list[Path | int] = list(paths if fds is None else fds)
    sizes = [os.stat(one).st_size for one in opened]
    made, begin = hashlib.sha256(), 0
    step = max(SAMPLE, sum(sizes) // SAMPLES)
    for path, one, size in zip(paths, opened, sizes, strict=True):
        made.update(f"{path.name} {size}\n".encode())
        mine = range(-begin % step, size, step)
        if mine:
            with open(one, "rb", buffering=0, closefd=isinstance(one, Path)) as file:
                for at in mine:
                    made.update(os.pread(file.fileno(), SAMPLE, at))
        begin += size
    return made.hexdigest()[:16]
