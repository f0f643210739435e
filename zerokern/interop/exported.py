"""A folder of exported weights, in which the old export stays whole until the new one is.

A single file is renamed into place when it is complete. Several files are written under names that no index has yet;
then their index is renamed. Small files (`config.json`) wait as `*.single.new` or `*.index.new` and are renamed right
after; if a kill comes between, the next export does that. New files are on record in `*.new`, replaced ones in `*.old`,
so that the next export removes what a killed one left, and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerokern.checkpoint.folder import OpenFiles
from zerokern.core.errors import BudgetError, IoError, got
from zerokern.interop.tensorfile import INDEX, SINGLE, Header, read_header, read_index
from zerokern.io.advice import file_error, on_disk, refusing
from zerokern.io.files import free_nbytes, make_folder, reserve
from zerokern.io.lock import FolderLock, Use
from zerokern.io.renaming import Folder
from zerokern.memory.room import amount

__all__ = ["BESIDE", "Target", "file_names", "headers_of", "open_begun"]

NEW, OLD = ".new", ".old"
WITH_SINGLE, WITH_INDEX = ".single.new", ".index.new"  # which weights a small file waits for
USE = Use(user="an export", advice="; wait for it, or export into another folder")
BESIDE = ("config.json", "generation_config.json")  # what goes with the weights, if the model knows it


def file_names(count: int, token: str = "") -> list[str]:
    """Returns Hugging Face's names for the files of one model; with a token if these names are taken.

    >>> file_names(2), file_names(1, "5f")
    (['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'], ['model-5f-00001-of-00001.safetensors'])
    """
    middle = f"-{token}" if token else ""
    return [f"model{middle}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def headers_of(path: Path, held: OpenFiles) -> list[Header]:
    """Returns the checked headers of a safetensors file, or of the files of a folder; `held` keeps the files open.

    A single `model.safetensors` takes precedence over an index, as it does for Hugging Face.
    """
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        raise IoError(
            f"there is no {path} here; a model of the Hugging Face Hub is downloaded first: "
            f'zk.load_pretrained(model, huggingface_hub.snapshot_download("{path.as_posix()}"))',
            path=str(path),
        )
    if not path.is_dir():
        return [_header(path, held)]
    if (path / SINGLE).exists():
        return [_header(path / SINGLE, held)]
    if (path / INDEX).exists():
        return _indexed(path, read_index(path / INDEX), held)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    there = ", ".join(files or sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    do = "name one of the files" if files else "pickled weights (.bin, .pt) are not read: write them as safetensors"
    raise file_error(path, f"holds neither {SINGLE} nor {INDEX}, but {there}; {do}", 0)


def _header(path: Path, held: OpenFiles) -> Header:
    with on_disk(path, "cannot read"):
        return read_header(path, held.fd(path))


def _indexed(folder: Path, weight_map: Mapping[str, str], held: OpenFiles) -> list[Header]:
    headers = []
    for file in dict.fromkeys(weight_map.values()):
        if not (folder / file).exists():
            names = [name for name, home in weight_map.items() if home == file]
            says = f"{file} is missing from {folder}; {INDEX} places {len(names)} tensors in it, {names[0]!r} first"
            raise IoError(f"{says}. Fetch it, or export anew", path=str(folder / file), key=names[0], errno=2)
        header = _header(folder / file, held)
        for name, home in weight_map.items():
            if home == file and name not in header.entries:
                says = f"{folder / file} does not hold {name!r}, which {INDEX} places there"
                raise IoError(f"{says}: files of different models lie mixed", path=str(folder / file), key=name)
        # what is there beside the index's own counts too, unless the index knows it elsewhere
        mine = {name: entry for name, entry in header.entries.items() if weight_map.get(name, file) == file}
        headers.append(Header(header.path, mine, header.metadata))
    return headers


class Target:
    """The locked folder with new files that are not published yet. Only the first rank has one."""

    def __init__(self, folder: Path, nbytes: int, names_of: Sequence[Sequence[str]], total_size: int) -> None:
        """`nbytes` will be written, `total_size` of them of tensors; `names_of`: those of each file."""
        self.folder = folder
        with refusing(folder, "Exporting"):
            if folder.suffix == ".safetensors" or (folder.exists() and not folder.is_dir()):
                raise ValueError(got("path", str(folder), "a folder, which is made where it is missing"))
            make_folder(folder)
            self._inside = Folder(folder)
            try:
                self._lock = FolderLock(folder, USE)
            except BaseException:
                self._inside.close()
                raise
        try:
            with on_disk(folder, "cannot prepare"):
                self._clear_leftovers()
                self._refuse_without_space(nbytes)
                self.files = self._begin(names_of, total_size)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._lock.release()
        self._inside.close()

    def _begin(self, names_of: Sequence[Sequence[str]], total_size: int) -> list[str]:
        """Records the names of the files to write, and returns them."""
        if len(names_of) == 1:
            self._index = b""
            return [SINGLE + NEW]
        files = file_names(len(names_of))
        if any((self.folder / file).exists() for file in files):
            files = file_names(len(names_of), secrets.token_hex(4))
        weight_map = {name: file for file, names in zip(files, names_of, strict=True) for name in names}
        described = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        self._index = (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode()
        self._inside.write(INDEX + NEW, self._index)
        self._inside.sync()
        return files

    def start(self, number: int, first: bytes, nbytes: int) -> None:
        """Creates a file of that length, with its header."""
        path = self.folder / self.files[number]
        with on_disk(path, "cannot write"), self._inside.new(path.name) as file:
            reserve(file.fileno(), nbytes)
            file.write(first)

    def publish(self, beside: Mapping[str, bytes]) -> None:
        """Publishes the new files, which must be on disk. `beside`: small files that belong to them."""
        with on_disk(self.folder, "cannot publish in"):
            for name, content in beside.items():
                if not (self.folder / name).is_file() or (self.folder / name).read_bytes() != content:
                    self._inside.write(name + (WITH_INDEX if self._index else WITH_SINGLE), content)
            if self._index:
                self._publish_index()
            else:
                self._inside.rename((SINGLE + NEW, SINGLE))
                self._rename_beside(WITH_SINGLE)
                self._inside.remove(*self._named_in(INDEX), INDEX)
            self._inside.sync()
        self._release()

    def _publish_index(self) -> None:
        # an index that a kill has left behind may name files that were gone, and are the new ones now
        replaced = [name for name in self._named_in(INDEX) if name not in self.files]
        if replaced:
            self._inside.write(INDEX + OLD, (self.folder / INDEX).read_bytes())
        self._inside.rename((INDEX + NEW, INDEX))
        self._inside.remove(SINGLE)  # from here on the index counts
        self._rename_beside(WITH_INDEX)
        self._inside.remove(*replaced, INDEX + OLD)

    def _rename_beside(self, waiting: str) -> None:
        there = [name for name in BESIDE if (self.folder / (name + waiting)).exists()]
        self._inside.rename(*((name + waiting, name) for name in there))

    def _finish_beside(self) -> None:
        """Publishes or removes small files that a killed export left, depending on whether their weights were
        published."""
        for waiting, weights in ((WITH_SINGLE, SINGLE), (WITH_INDEX, INDEX)):
            names = [name + waiting for name in BESIDE]
            if not any((self.folder / name).exists() for name in names):
                continue
            if (self.folder / (weights + NEW)).exists():
                self._inside.remove(*names)
                self._inside.sync()  # before their weights go: without these, they would seem to have been published
                continue
            if weights == INDEX:
                self._inside.remove(SINGLE)
            self._rename_beside(waiting)

    def abandon(self) -> None:
        """Removes the new files, unless they are published."""
        if self._inside.fd < 0:
            return
        try:
            with on_disk(self.folder, "cannot clear"):
                self._clear_leftovers()
        finally:
            self._release()

    def _clear_leftovers(self) -> None:
        """Removes files of exports that were killed, and old files that they did not remove."""
        self._finish_beside()
        current = set(self._named_in(INDEX))
        for record in (INDEX + NEW, INDEX + OLD):
            self._inside.remove(*(name for name in self._named_in(record) if name not in current), record)
        self._inside.remove(SINGLE + NEW)

    def _named_in(self, index: str) -> list[str]:
        try:
            return list(dict.fromkeys(read_index(self.folder / index).values()))
        except IoError:  # none there, or cut off while it was written: then nothing else was begun
            return []

    def _refuse_without_space(self, nbytes: int) -> None:
        free = free_nbytes(self.folder)
        if nbytes > free:
            raise BudgetError(
                f"the export takes {amount(nbytes)}, and the disk of {self.folder} has {amount(free)} left (an export "
                "that is there stays until the new one is whole); make room, choose another disk or a narrower dtype"
            )


@contextmanager
def open_begun(folder: Folder, name: str) -> Iterator[int]:
    """Context manager that opens a file which `Target.start` made. It must be a regular file without another name."""
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder.fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.ELOOP, "somebody has put another file in its place", name)
        yield fd
    finally:
        os.close(fd)
