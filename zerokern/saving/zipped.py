"""The zip file around one tensor's raw bytes, as ``torch.save`` makes it: what stands before them and what behind.

The bytes themselves do not pass through here: their CRC-32 is not known when the header is written. It is 0, as after
``torch.serialization.set_crc32_options(False)``: torch's reader does not look at it. Layout: PKWARE's APPNOTE 6.3.9.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import _utils as rebuilding

from zerokern.saving.pickled import STORAGES

__all__ = ["ALIGN", "envelope"]

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
    """What to write before and behind the contiguous bytes of a tensor, so that torch.load reads it.

    >>> before, after = envelope(torch.float32, (2, 2))
    >>> torch.load(io.BytesIO(before + torch.ones(2, 2).numpy().tobytes() + after), weights_only=True)
    tensor([[1., 1.],
            [1., 1.]])
    >>> len(before) % ALIGN
    0
    """
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
