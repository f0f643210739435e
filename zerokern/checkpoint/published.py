"""What a checkpoint's folder holds: a published checkpoint, or what can be loaded instead; files that stay open."""

from __future__ import annotations

import calendar
import errno
import hashlib
import os
import re
import resource
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from zerokern.checkpoint.index import NAME, FileRow, Index, unfit
from zerokern.core.errors import IoError
from zerokern.io.advice import refused
from zerokern.io.lock import Holder
from zerokern.memory.room import amount

__all__ = [
    "DATA",
    "LOCK",
    "METADATA",
    "Held",
    "Published",
    "data_name",
    "latest",
    "leftovers",
    "likeness",
    "listed",
    "saved_at",
    "started",
    "why_broken",
]

SAMPLES, SAMPLE = 64, 4096  # how many places of some files are compared, and how many bytes of each


class Held:
    """Descriptors by path. `tables` has checksums that were read from them."""

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


METADATA = ".metadata"  # torch's name for its own index
SAVE_ID = r"\d{8}T\d{6}-[0-9a-f]{6}"
DATA = re.compile(rf"({SAVE_ID})_\d+\.distcp")  # a data file of ours
NEW = re.compile(rf"{re.escape(NAME)}\.new|\.metadata\.({SAVE_ID})\.new")
LOCK = "zerokern.lock"


def data_name(save_id: str, rank: int) -> str:
    """The data file of one rank."""
    return f"{save_id}_{rank}.distcp"


def saved_at(save_id: str) -> float:
    """When that save began, in seconds since 1970.

    >>> saved_at("20261122T070024-a1b2c3")
    1795330824.0
    """
    return float(calendar.timegm(time.strptime(save_id.partition("-")[0], "%Y%m%dT%H%M%S")))


@dataclass(frozen=True)
class Published:
    """A checkpoint that was published: its folder and its index; each data file is there, as long as it must be."""

    folder: Path
    index: Index
    held: Held | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, hold: bool = False) -> Published:
        """Reads the index and looks at the data files; the error says what is there, and what can be loaded instead.

        `hold`: the files stay open, whatever is saved into the folder meanwhile, until `close`.
        """
        folder = Path(path)
        index = _read(folder)
        while True:
            held = Held() if hold else None
            broken = [says for says in (why_broken(folder, file, held) for file in index.files) if says]
            if not broken:
                return cls(folder, index, held)
            if held is not None:
                held.close()
            # A save may have replaced the checkpoint between the two looks: then there is another index now.
            newer = _read(folder)
            if newer.save_id == index.save_id:
                raise IoError(
                    f"{folder} is not whole: {'; '.join(broken)}. {_instead(folder)}",
                    path=str(folder / index.files[0].name),
                    errno=errno.ENODATA,
                )
            index = newer

    def close(self) -> None:
        """Lets go of files that were held."""
        if self.held is not None:
            self.held.close()

    def path(self, file: FileRow | int) -> Path:
        """Where one of its data files is."""
        return self.folder / (self.index.files[file] if isinstance(file, int) else file).name


def latest(parent: Path) -> Path | None:
    """The newest published checkpoint among the children of a folder.

    >>> latest(Path("no such folder")) is None
    True
    """
    found = [(child.stat().st_mtime_ns, child.parent) for child in parent.glob(f"*/{NAME}")]
    return next((folder for _, folder in sorted(found, reverse=True) if _is_whole(folder)), None)


def _is_whole(folder: Path) -> bool:
    try:
        index = Index.load((folder / NAME).read_bytes(), folder / NAME)
    except (OSError, IoError):
        return False
    return not any(why_broken(folder, file) for file in index.files)


def leftovers(folder: Path, keep: Index | None) -> list[Path]:
    """Files of saves that were never published, or are no longer: all of ours that the index `keep` does not name."""
    kept = {file.name for file in keep.files} if keep else set()
    return [
        path
        for path in listed(folder)
        if (DATA.fullmatch(path.name) and path.name not in kept) or NEW.fullmatch(path.name)
    ]


def started(folder: Path) -> str:
    """What there is to say of a save into the folder that has not been published; "" where there is none."""
    ids = sorted(found[1] for found in map(DATA.fullmatch, (path.name for path in listed(folder))) if found)
    if not ids and not (folder / LOCK).exists():
        return ""
    since = time.strftime(" of %Y-%m-%d %H:%M:%S UTC", time.gmtime(saved_at(ids[-1]))) if ids else ""
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


def why_broken(folder: Path, file: FileRow, held: Held | None = None) -> str:
    """What is wrong with a data file as far as its length tells; "" where nothing is. `held` has it from here on."""
    try:
        fd = None if held is None else held.fd(folder / file.name)
        found = os.stat(folder / file.name if fd is None else fd).st_size
    except FileNotFoundError:
        return f"{file.name}, {amount(file.nbytes)}, is missing"
    if found == file.nbytes:
        return ""
    how = "truncated" if found < file.nbytes else "longer than it was"
    return f"{file.name} is {how}: it has {found:,} bytes, {file.nbytes:,} were written"


def _read(folder: Path) -> Index:
    try:
        data = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_checkpoint(folder) from None
    except OSError as error:
        raise refused(error, folder, "Loading") from error
    return Index.load(data, folder / NAME)


def _no_checkpoint(folder: Path) -> IoError:
    """Says what is there instead, and what can be loaded."""
    number = errno.ENOENT
    if not folder.exists():
        says = "does not exist"
    elif not folder.is_dir():
        says, number = "is a file, no folder of a checkpoint", errno.ENOTDIR
    elif what := started(folder):
        says = f"holds no published checkpoint: {what}, and is ignored"
    else:
        names = [path.name for path in listed(folder)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        says = f"is no checkpoint: there is no {NAME} in it, but {shown or 'nothing at all'}"
    return unfit(folder, f"{says}. {_instead(folder)}", number)


def _instead(folder: Path) -> str:
    below = latest(folder) if folder.is_dir() else None
    if below is not None:
        return f"The newest checkpoint within it is {below}: load that"
    beside = latest(folder.parent) if folder.parent.is_dir() else None
    if beside is not None and beside != folder:
        return f"The newest published checkpoint beside it is {beside}: load that"
    return "No other checkpoint was ever published in it or beside it"


def listed(folder: Path) -> list[Path]:
    """What a folder holds, by name; nothing where there is no folder."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
