"""What takes the place of something older does it whole: written under another name, synced, renamed, synced."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["Folder"]


class Folder:
    """A folder that is held open, whatever takes its name later.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
    ...     folder.write("index.new", b"whole")
    ...     folder.rename(("index.new", "index"))
    ...     os.listdir(path)
    ['index']
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def new(self, name: str, mode: int = 0o666) -> BinaryIO:
        """A file that nobody else has made: the folder may be somebody's who puts links into it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(name, flags, mode, dir_fd=self.fd), "wb")

    def write(self, name: str, content: bytes | Iterable[bytes | memoryview], mode: int = 0o666) -> None:
        """A file of that content, or of all of these buffers, which lasts when this returns; its name lasts from the
        next rename on."""
        try:
            made = self.new(name, mode)
        except FileExistsError:  # a kill has left it
            self.remove(name)
            made = self.new(name, mode)
        with made as file:
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, *names: tuple[str, str]) -> None:
        """From the first names to the second ones, in this order, once all that is in the folder lasts; they last."""
        self.sync()
        for name, to in names:
            os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def remove(self, *names: str) -> None:
        """Those that are there."""
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Names are part of the folder, and last only when it does."""
        os.fsync(self.fd)

    def close(self) -> None:
        """The second time it does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
