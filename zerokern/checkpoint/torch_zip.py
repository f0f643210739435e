"""The zip that torch.save puts around a tensor: the bytes before and after the tensor's own, written without reading
it.

The CRC-32 of the tensor is written as 0, because it is not known yet; torch's reader does not check it, as after
``torch.serialization.set_crc32_options(False)``. Layout: PKWARE's APPNOTE 6.3.9.
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

__all__ = ["ALIGN", "STORAGES", "zip_around"]

ALIGN = 64  # of the raw bytes within the zip, as torch's own: whole cache lines, and a multiple of every element
FOLDER = b"archive/"
PROTOCOL = 2  # the one that torch.load(weights_only=True) reads
LARGE = 0xFFFFFFFF  # from here on a 32-bit field of a zip says: see the 64-bit one
PADDING = 0x4246  # id of the extra field that torch pads with
STORAGES = {  # classes of storages by name; all other dtypes lie in an untyped one
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
CLASSES = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")


def zip_around(dtype: torch.dtype, sizes: Sequence[int]) -> tuple[bytes, bytes]:
    """Returns the bytes to write before and after a contiguous tensor, so that torch.load can read it."""
    return _zip_around(dtype, tuple(int(size) for size in sizes))  # a torch.Size would be pickled by its name


@lru_cache(maxsize=1024)  # a model has few shapes, and many tensors
def _zip_around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    stream = io.BytesIO()
    _Pickler(stream, PROTOCOL).dump(_Tensor(dtype, sizes))
    before, directory, count = b"", b"", 0
    files = {"data.pkl": stream.getvalue(), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    for name, data in files.items():
        local, central = _headers(name, len(data), zlib.crc32(data), len(before))
        before, directory, count = before + local + data, directory + central, count + 1
    nbytes = prod(sizes) * dtype.itemsize
    local, central = _headers("data/0", nbytes, 0, len(before), align=ALIGN)
    before, directory = before + local, directory + central
    return before, directory + _end(count + 1, len(directory), len(before) + nbytes)


def _headers(name: str, nbytes: int, crc: int, at: int, align: int = 1) -> tuple[bytes, bytes]:
    """Returns the two headers of a stored file: the one before its bytes, at `at` of the zip, and the one in the
    directory.

    The file's bytes begin at a multiple of `align`. Large files come last, so that only the directory begins beyond 4
    GiB.
    """
    path, large = FOLDER + name.encode(), nbytes >= LARGE
    shown, version = (LARGE, 45) if large else (nbytes, 20)
    sizes = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
    extra = sizes
    if align > 1:
        gap = -(at + LOCAL.size + len(path) + len(extra) + 4) % align
        extra += struct.pack("<HH", PADDING, gap) + bytes(gap)
    local = LOCAL.pack(b"PK\3\4", version, 0, 0, 0, 0, crc, shown, shown, len(path), len(extra))
    fields = (crc, shown, shown, len(path), len(sizes), 0, 0, 0, 0, at)
    central = CENTRAL.pack(b"PK\1\2", version, version, 0, 0, 0, 0, *fields)
    return local + path + extra, central + path + sizes


def _end(count: int, nbytes: int, at: int) -> bytes:
    """Returns what follows a zip directory of `count` entries and nbytes that begins at `at`."""
    made = b""
    if at + nbytes >= LARGE:
        made = END_64.pack(b"PK\6\6", END_64.size - 12, 45, 45, 0, 0, count, count, nbytes, at)
        made += LOCATOR_64.pack(b"PK\6\7", 0, at + nbytes, 1)
        at = LARGE
    return made + END.pack(b"PK\5\6", 0, 0, count, count, nbytes, at, 0)


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
        kind = CLASSES.get(self.dtype)
        if kind is not None:
            return rebuilding._rebuild_tensor_v2, (_Storage(kind, numel), *rest)
        untyped = _Storage(torch.UntypedStorage, numel * self.dtype.itemsize)
        return rebuilding._rebuild_tensor_v3, (untyped, *rest, self.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return ("storage", value.kind, "0", "cpu", value.numel) if isinstance(value, _Storage) else None
