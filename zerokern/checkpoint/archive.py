"""The zip that torch.save makes around tensors: written without reading what is in it, and looked at before torch does.

Ours: the raw bytes do not pass through here, so their CRC-32 is not known when the header is written. It is 0, as after
``torch.serialization.set_crc32_options(False)``: torch's reader does not look at it. Layout: PKWARE's APPNOTE 6.3.9.
Others': torch's reader believes a storage's length, maps a record whether it is compressed or not, and looks at no
checksum.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import _utils as rebuilding

from zerokern.checkpoint.pickled import STORAGES, Stored, damaged, inert
from zerokern.core.errors import BudgetError, IoError
from zerokern.memory.room import amount, room

__all__ = ["ALIGN", "BROKEN", "Archive", "envelope"]

ALIGN = 64  # of the raw bytes within the zip, as torch's own: whole cache lines, and a multiple of every element
FOLDER = "archive"
PROTOCOL = 2  # the one that torch.load(weights_only=True) reads
LARGE = 0xFFFFFFFF  # from here on a 32-bit field of a zip says: see the 64-bit one
PADDING = 0x4246  # id of the extra field that torch pads with
NAMED = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")


def envelope(dtype: torch.dtype, sizes: Sequence[int]) -> tuple[bytes, bytes]:
    """What to write before and behind the contiguous bytes of a tensor, so that torch.load reads it."""
    return _envelope(dtype, tuple(int(size) for size in sizes))  # a torch.Size would be pickled by its name


@lru_cache(maxsize=1024)  # a model has few shapes, and many tensors
def _envelope(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    parts = []
    entries = []
    at = 0
    for name, data in (
        ("data.pkl", _pickled(dtype, sizes)),
        ("byteorder", sys.byteorder.encode()),
        ("version", b"3\n"),
    ):
        entry = _Entry(name, len(data), zlib.crc32(data), at)
        parts += [entry.local(), data]
        at += len(parts[-2]) + len(data)
        entries.append(entry)
    entry = _Entry("data/0", prod(sizes) * dtype.itemsize, 0, at)
    parts.append(entry.local(ALIGN))
    before = b"".join(parts)
    entries.append(entry)
    return before, _directory(entries, len(before) + entry.nbytes)


@dataclass(frozen=True)
class _Entry:
    """One stored file of the zip, whose header begins at `at`."""

    name: str
    nbytes: int
    crc: int
    at: int

    @property
    def path(self) -> bytes:
        return f"{FOLDER}/{self.name}".encode()

    def local(self, align: int = 1) -> bytes:
        """Its header; behind it the bytes begin at a multiple of `align` of the zip."""
        large = self.nbytes >= LARGE
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if large else b""
        if align > 1:
            behind = self.at + LOCAL.size + len(self.path) + len(extra) + 4
            extra += struct.pack("<HH", PADDING, -behind % align) + bytes(-behind % align)
        shown = LARGE if large else self.nbytes
        return (
            LOCAL.pack(b"PK\3\4", 45 if large else 20, 0, 0, 0, 0, self.crc, shown, shown, len(self.path), len(extra))
            + self.path
            + extra
        )

    def central(self) -> bytes:
        """Its line of the directory. What begins beyond 4 GiB is only the directory itself: large bytes come last."""
        large = self.nbytes >= LARGE
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if large else b""
        shown = LARGE if large else self.nbytes
        version = 45 if large else 20
        fields = (self.crc, shown, shown, len(self.path), len(extra), 0, 0, 0, 0, self.at)
        return CENTRAL.pack(b"PK\1\2", version, version, 0, 0, 0, 0, *fields) + self.path + extra


def _directory(entries: list[_Entry], at: int) -> bytes:
    lines = b"".join(entry.central() for entry in entries)
    count, nbytes = len(entries), len(lines)
    if at + nbytes >= LARGE:
        end_64 = END_64.pack(b"PK\6\6", END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, at)
        lines += end_64 + LOCATOR_64.pack(b"PK\6\7", 0, at + nbytes, 1)
        at = LARGE
    return lines + END.pack(b"PK\5\6", 0, 0, count, count, nbytes, at, 0)


@dataclass(frozen=True)
class _Storage:
    kind: Any
    numel: int


@dataclass(frozen=True)
class _Tensor:
    """Pickles as a contiguous tensor over storage 0."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        numel = prod(self.sizes)
        strides = [1] * len(self.sizes)
        for dim in range(len(self.sizes) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * max(self.sizes[dim], 1)
        rest: tuple[Any, ...] = (0, self.sizes, tuple(strides), False, OrderedDict())
        kind = NAMED.get(self.dtype)
        if kind is not None:
            return rebuilding._rebuild_tensor_v2, (_Storage(kind, numel), *rest)
        return rebuilding._rebuild_tensor_v3, (
            _Storage(torch.UntypedStorage, numel * self.dtype.itemsize),
            *rest,
            self.dtype,
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: Any) -> tuple[Any, ...] | None:
        return ("storage", found.kind, "0", "cpu", found.numel) if isinstance(found, _Storage) else None


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, PROTOCOL).dump(_Tensor(dtype, sizes))
    return stream.getvalue()


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
