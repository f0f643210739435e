"""A temporary folder on a real disk, for state that must not lie in memory."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "rootfs")


@dataclass(frozen=True)
class Place:
    """A folder, and the file system that it lies on."""

    folder: Path
    filesystem: str

    @property
    def in_memory(self) -> bool:
        return self.filesystem in IN_MEMORY

    def __str__(self) -> str:
        return f"{self.folder} ({self.filesystem}{', which is memory and no disk' if self.in_memory else ''})"


def filesystem_of(folder: Path, mounts: str | None = None) -> str:
    """The type of file system that a folder lies on, from the lines of /proc/mounts.

    >>> filesystem_of(Path("/data/me"), "/dev/sda / ext4 rw 0 0\\ntmpfs /data tmpfs rw 0 0")
    'tmpfs'
    """
    text = Path("/proc/mounts").read_text() if mounts is None else mounts
    folder = folder.resolve()
    found = (0, "unknown")
    for line in text.splitlines():
        _, at, kind, *_ = line.split()
        at = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), at)
        if folder.is_relative_to(at) and len(at) >= found[0]:  # of two mounts on one point the later one is seen
            found = (len(at), kind)
    return found[1]


def places(folders: Iterable[Path], nbytes: int) -> list[Place]:
    """Those of the folders that exist and have room for nbytes, disks first."""
    fitting = [
        Place(one, filesystem_of(one)) for one in folders if one.is_dir() and shutil.disk_usage(one).free > nbytes
    ]
    return sorted(fitting, key=lambda place: place.in_memory)


@contextmanager
def temporary(nbytes: int, folders: Iterable[Path] | None = None) -> Iterator[Place | None]:
    """A new folder with room for nbytes, removed in the end; None where there is none."""
    if folders is None:
        folders = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd(), Path.home()]
    for place in places(folders, nbytes):
        try:
            made = tempfile.TemporaryDirectory(prefix="zerokern-", dir=place.folder)
        except OSError:  # read-only, or somebody else's
            continue
        with made as folder:
            yield Place(Path(folder), place.filesystem)
        return
    yield None
