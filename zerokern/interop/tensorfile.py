"""The safetensors format: a length, a header in JSON, and the bytes of the tensors behind it, without gaps.

Every number in a header is checked against the file before it is used; reading a header runs no code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerokern.core.errors import IoError, got
from zerokern.io.advice import file_error, on_disk

__all__ = [
    "DTYPES", "FLOATS", "INDEX", "SINGLE", "Header", "TensorBytes", "code_of", "header", "read_header", "read_index",
]  # fmt: skip

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # as the format's own library has it
PADDING = 8

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BITS = {code: 8 * dtype.itemsize for code, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_FOREIGN = (  # what other files begin with
    (b"PK\x03\x04", "a zip file, as torch.save writes it"),
    (b"\x80", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer, whose file was not fetched (git lfs pull)"),
    (b"<", "a web page or XML"),
    (b"{", "JSON"),
)


@dataclass(frozen=True)
class TensorBytes:
    """The bytes of one tensor, contiguous, from `offset` of its file on."""

    path: Path
    name: str
    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None where torch has none such."""
        return DTYPES.get(self.code)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The tensors of a file, by name and in the order of their bytes."""

    path: Path
    entries: dict[str, TensorBytes]
    metadata: dict[str, str]


class Beginning(NamedTuple):
    """The bytes that a file begins with, where each of its tensors lies in it, and its length."""

    first: bytes
    offsets: dict[str, int]
    nbytes: int


def code_of(name: str, dtype: torch.dtype) -> str:
    """Returns what the format calls a dtype.

    >>> code_of("weight", torch.bfloat16)
    'BF16'
    """
    if dtype not in _CODES:
        raise TypeError(got(f"the dtype of {name!r}", dtype, "one of " + ", ".join(map(str, _CODES))))
    return _CODES[dtype]


def header(
    rows: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> Beginning:
    """Lays out a file of these tensors.

    The widest dtypes come first, so that every tensor lies at a multiple of its element.

    >>> first, offsets, nbytes = header([("bias", torch.float16, [3]), ("weight", torch.float32, [2, 2])])
    >>> offsets == {"weight": len(first), "bias": len(first) + 16}, nbytes == len(first) + 22
    (True, True)
    """
    listed = sorted(rows, key=lambda row: -row[1].itemsize)
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name, dtype, shape in listed:
        if name in described or name == "__metadata__":
            raise ValueError(got("the name of a tensor", name, "names that differ, other than '__metadata__'"))
        begins[name] = end
        end += math.prod(shape) * dtype.itemsize
        offsets = [begins[name], end]
        described[name] = {"dtype": code_of(name, dtype), "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % PADDING)
    if len(text) > MOST_HEADER:
        raise ValueError(got("a header", f"{len(text)} B", f"up to {MOST_HEADER} B: fewer tensors in a file"))
    first = len(text).to_bytes(8, "little") + text
    return Beginning(first, {name: len(first) + begin for name, begin in begins.items()}, len(first) + end)


def read_header(path: Path, fd: int | None = None) -> Header:
    """Reads the header of a file and compares it with the file; the IoError says what is wrong with which tensor.

    `fd`: the file, where it is open already.
    """
    with on_disk(path, "cannot read"), open(path if fd is None else fd, "rb", closefd=fd is None) as file:
        file.seek(0)
        size = os.fstat(file.fileno()).st_size
        first = file.read(32)
        if len(first) < 8:
            raise _bad(path, f"it has {size} B, and a header's length alone takes 8: truncated, or no such file")
        length = int.from_bytes(first[:8], "little")
        if length > MOST_HEADER or 8 + length > size:
            raise _bad(path, _no_header(first, length, size))
        file.seek(8)
        text = file.read(length)
    described = _parsed(path, text)
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "its __metadata__ is not a mapping of text to text")
    entries = [_entry(path, name, row, 8 + length) for name, row in described.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _without_gaps(path, entries, 8 + length, size)
    return Header(path, {entry.name: entry for entry in entries}, metadata)


def read_index(path: Path) -> dict[str, str]:
    """Reads which file of the folder holds which tensor, of a `model.safetensors.index.json`."""
    with on_disk(path, "cannot read"):
        text = path.read_bytes()
    weight_map = _parsed(path, text).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise _bad(path, "it has no weight_map of tensors' names to files' names")
    for name, file in weight_map.items():
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise _bad(path, f"it places {name!r} in {file!r}, which is no name of a file beside it", key=name)
    return weight_map


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its JSON cannot be read ({error}): damaged, or of another format") from error
    if not isinstance(parsed, dict):
        raise _bad(path, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return parsed


def _no_header(first: bytes, length: int, size: int) -> str:
    for beginning, what in _FOREIGN:
        if first.startswith(beginning):
            return f"it begins as {what} does; allowed: safetensors files, which load without running anything"
    if length > MOST_HEADER:
        return f"its header would take {length} B, more than the {MOST_HEADER} B allowed: not a safetensors file"
    return f"its header takes {length} B, and the file has {size} B: truncated within the header"


def _entry(path: Path, name: str, row: Any, data: int) -> TensorBytes:
    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= row.keys():
        raise _bad(path, f"{name!r} is not described by dtype, shape and data_offsets", key=name)
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if code not in _BITS:
        raise _bad(path, f"{name!r} is of dtype {code!r}; known: {', '.join(_BITS)}", key=name)
    if not _naturals(shape):
        raise _bad(path, f"{name!r} has the shape {shape!r}, which is none", key=name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(path, f"{name!r} has the data_offsets {offsets!r}; needed: a begin and an end behind it", key=name)
    bits = math.prod(shape) * _BITS[code]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        says = f"{name!r} of shape {shape} in {code} takes {bits / 8:g} B, and its data_offsets span"
        raise _bad(path, f"{says} {offsets[1] - offsets[0]} B", key=name)
    return TensorBytes(path, name, code, tuple(shape), data + offsets[0], offsets[1] - offsets[0])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _without_gaps(path: Path, entries: Sequence[TensorBytes], data: int, size: int) -> None:
    end, last = data, ""
    for entry in entries:
        if entry.offset < end:
            raise _bad(path, f"{entry.name!r} and {last!r} overlap", key=entry.name, offset=entry.offset)
        if entry.offset > end:
            raise _bad(path, f"{entry.offset - end} B before {entry.name!r} belong to no tensor", key=entry.name)
        if entry.offset + entry.nbytes > size:
            says = f"{entry.name!r} ends at byte {entry.offset + entry.nbytes}, and the file has {size} B: truncated"
            raise _bad(path, says, key=entry.name, offset=entry.offset)
        end, last = entry.offset + entry.nbytes, entry.name
    if end != size:
        raise _bad(path, f"{size - end} B behind the last tensor belong to none: damaged, or of another format")


def _bad(path: Path, why: str, *, key: str | None = None, offset: int = 0) -> IoError:
    return file_error(path, f"is no good safetensors file: {why}. Fetch or write it anew", 0, offset=offset, key=key)
