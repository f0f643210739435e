"""The zip of torch.save, looked at before torch reads it: what its header asks for is there, and its CRC-32s.

torch's reader believes a storage's length, maps a record whether it is compressed or not, and looks at no checksum.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import BudgetError, IoError
from zerokern.memory.room import amount, room
from zerokern.saving.pickled import Stored, damaged, inert

__all__ = ["BROKEN", "Archive"]

PIECE = 1 << 20
MOST_TEXT = 64 << 20  # bytes of a pickle that is longer than the file which it lies compressed in
# What reading a damaged zip may raise, RuntimeError where its flags say that it is encrypted.
BROKEN = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError, RuntimeError)


class Archive:
    """The records of one file; `content` is what its pickle says, with a `Stored` in the place of each tensor.

    `mapped`: whether its tensors can stay in the file. `summed`: whether all of its records have a checksum.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/a.pt")
    ...     archive = Archive(Path(folder, "a.pt"))
    >>> archive.mapped, archive.content["w"].size
    (True, (2,))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[str] = set()
        with self._open() as archive:
            entries = {one.filename: one for one in archive.infolist()}
            names = [name for name in entries if name.endswith("/data.pkl")]
            if len(names) != 1 or len(entries) != len(archive.infolist()):
                raise ValueError("it is no file of torch.save")
            self._entries, self._root = entries, names[0].removesuffix("data.pkl")
            self.mapped = all(one.compress_type == zipfile.ZIP_STORED for one in entries.values())
            self.summed = all(hasattr(one, "CRC") or not one.file_size for one in entries.values())
            size = os.stat(path).st_size
            stored = sum(one.compress_size for one in entries.values())
            if stored > size or (self.mapped and any(one.file_size != one.compress_size for one in entries.values())):
                raise ValueError(f"its records take {stored} bytes, and it has {size}")
            self._refuse_without_room(size)
            if entries[names[0]].file_size > size + MOST_TEXT:
                raise ValueError(f"its pickle takes {entries[names[0]].file_size} bytes, and the file has {size}")
            self.content = inert(archive.read(names[0]), path)
            for found in _tensors(self.content):
                self._refuse_beyond(found)

    def check(self, stored: Stored, key: str) -> None:
        """Raises where the record of this tensor is not what was written, as far as its checksum tells; once."""
        name = self._record(stored)
        if name in self._checked:
            return
        with self._open(key) as archive, archive.open(name) as record:
            while record.read(PIECE):  # the last one compares
                pass
        self._checked.add(name)

    def tensor(self, stored: Stored, key: str) -> Tensor:
        """The tensor that stands for, its checksum compared."""
        with self._open(key) as archive:
            data = bytearray(archive.read(self._record(stored)))
        whole = torch.frombuffer(data, dtype=stored.dtype) if data else torch.empty(0, dtype=stored.dtype)
        return whole.as_strided(stored.size, stored.stride, stored.offset)

    def _record(self, stored: Stored) -> str:
        return f"{self._root}data/{stored.storage}"

    def _refuse_beyond(self, stored: Stored) -> None:
        """Every number in it has come from the file."""
        if any(type(one) is not int or one < 0 for one in (stored.nbytes, stored.offset, *stored.size)):
            raise ValueError(f"a tensor has the size {stored.size} at {stored.offset}")
        found = self._entries.get(self._record(stored))
        if found is None or found.file_size != stored.nbytes:
            there = "is not there" if found is None else f"has {found.file_size} bytes"
            raise ValueError(f"record {stored.storage} is to have {stored.nbytes} bytes, and {there}")
        if stored.end > stored.nbytes or any(type(one) is not int or one < 0 for one in stored.stride):
            raise ValueError(f"a tensor of {stored.size} reaches beyond the {stored.nbytes} bytes of its record")

    def _refuse_without_room(self, size: int) -> None:
        """What is compressed has to be unpacked into memory; a zip of a few megabytes can say that it is gigabytes."""
        if self.mapped:
            return
        nbytes = sum(one.file_size for one in self._entries.values())
        left = room()
        if left and nbytes > min(left.values()):
            raise BudgetError(
                f"{self.path} has {amount(size)}, is compressed and takes {amount(nbytes)} unpacked, which is more "
                f"than there is ({amount(min(left.values()))}). Repack it without compression (zip -0): then it is "
                "read in place"
            )

    @contextmanager
    def _open(self, key: str = "") -> Iterator[Any]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                for one in archive.infolist():
                    if not one.CRC:  # its writer was told to leave it out: nothing is compared with what is not there
                        del one.CRC
                yield archive
        except (IoError, BudgetError):
            raise
        except BROKEN as error:
            found = damaged(self.path, f"{key}: {error}" if key else str(error))
            found.key = key or None
            raise found from error


def _tensors(content: Any) -> Iterator[Stored]:
    """All of them, wherever they lie; what is named again and again is looked at once."""
    seen: set[int] = set()
    left = [content]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Stored):
            yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif hasattr(one, "arguments"):
            left += (one.arguments, one.state)
