"""The index of a checkpoint, ``zerokern.json``: which box of which tensor lies where. Checked text, and no pickle.

Line 1 is ``{"zerokern": 1, "crc32c": "<8 hex digits>"}``; the checksum is that of all the bytes behind the line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from zerokern.core.native import crc32c
from zerokern.core.units import itemsize
from zerokern.io.advice import file_error

__all__ = [
    "BLOCK_NBYTES", "FORMAT", "NAME", "SAVE_ID", "Box", "Cuboid", "FileRow", "Index", "TensorRow", "file_error",
    "refuse_uncovered",
]  # fmt: skip

NAME = "zerokern.json"
FORMAT = 1
BLOCK_NBYTES = 1 << 20  # of a data file has a checksum of its own
FILE_NAME = re.compile(r"[\w.-]+")
SAVE_ID = r"\d{8}T\d{6}-[0-9a-f]{6}"
_KINDS = {"save_id": str, "world": int, "versions": dict, "files": list, "values": dict, "tensors": dict}
_OF_VALUES = {"aliases": dict, "extra": dict, "extra_state": dict, "groups": list, "optimizers": list, "rng": dict}
Cuboid = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in each dimension, and how large it is there


@dataclass(frozen=True, slots=True)
class FileRow:
    """A data file of nbytes. From `table` on lie the CRC32C of its blocks before; `crc` is that of the table itself."""

    name: str
    nbytes: int
    table: int
    crc: int

    @property
    def blocks(self) -> int:
        return -(-self.table // BLOCK_NBYTES)


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a tensor; its raw bytes lie at `offset` of file number `file`.

    `item`: offset and length of the zip around the bytes, which torch's own reader knows.
    """

    file: int
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: tuple[int, int]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The box as the index has it: of a matrix eight numbers."""
        return (self.file, self.offset, *self.item, *self.offsets, *self.sizes)


@dataclass(slots=True)
class TensorRow:
    """A tensor as it was saved: dtype by name ("bfloat16"), logical shape, and the boxes that it is made of."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass
class Index:
    """The content of the index."""

    save_id: str
    world: int
    files: list[FileRow]
    tensors: dict[str, TensorRow]
    values: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Returns the bytes of the index. The same index gives the same bytes."""
        described = {
            "save_id": self.save_id,
            "world": self.world,
            "versions": self.versions,
            "files": [[file.name, file.nbytes, file.table, file.crc] for file in self.files],
            "values": self.values,
            "tensors": {
                key: [row.dtype, row.shape, [n for box in row.boxes for n in box.numbers]]
                for key, row in self.tensors.items()
            },
        }
        body = json.dumps(described, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        return b'{"zerokern": %d, "crc32c": "%08x"}\n%s' % (FORMAT, crc32c(body, len(body)), body)

    @staticmethod
    def load(data: bytes, path: Path) -> Index:
        """Parses `data`, the bytes of `path`; refuses what is not exactly what was written."""
        head, _, body = data.partition(b"\n")
        number, crc = _head(head, path)
        if number != FORMAT:
            newer = "a newer zerokern wrote it: install that one" if number > FORMAT else "no zerokern wrote it"
            raise file_error(path, f"has format {number}; this zerokern reads format {FORMAT}; {newer}")
        if not body.endswith(b"\n"):
            raise file_error(path, f"is truncated: it ends after {len(data)} bytes, in the middle of a line. {RESTORE}")
        if f"{crc32c(body, len(body)):08x}" != crc:
            says = f"was edited or damaged: the checksum of its {len(data)} bytes does not fit"
            raise file_error(path, f"{says}. {RESTORE}")
        try:
            return _parse(json.loads(body))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise file_error(path, f"has a sound checksum and no sound content: {error}. {RESTORE}") from error


RESTORE = "Restore it from a copy, or load another checkpoint; the data files are untouched"


def _boxes(flat: list[int], ndim: int) -> list[Box]:
    width = 4 + 2 * ndim
    if len(flat) % width:
        raise ValueError(f"{len(flat)} numbers are no boxes of {ndim} dimensions")
    made = []
    for at in range(0, len(flat), width):
        file, offset, start, length, *edges = flat[at : at + width]
        made.append(Box(file, offset, tuple(edges[:ndim]), tuple(edges[ndim:]), (start, length)))
    return made


def _head(head: bytes, path: Path) -> tuple[int, str]:
    try:
        described = json.loads(head)
        return int(described["zerokern"]), str(described["crc32c"])
    except (KeyError, TypeError, ValueError, OverflowError):
        says = f"does not begin as an index of zerokern does, but with {head[:40]!r}"
        raise file_error(path, f"{says}: it was truncated, edited, or is not one. {RESTORE}") from None


def _parse(described: dict[str, Any]) -> Index:
    if constants := list(_constants(described)):
        raise ValueError(f"{constants[0]} is no number that a save writes")
    _check_kinds(described, _KINDS, "")
    if not re.fullmatch(SAVE_ID, described["save_id"]):
        raise ValueError(f"'save_id' is {described['save_id']!r}, which names no save")
    values = described["values"]
    there = {key: kind for key, kind in _OF_VALUES.items() if values.get(key) is not None}
    _check_kinds(values, there, " of 'values'")
    extra = values.get("extra") or {}
    _check_kinds(extra, dict.fromkeys(extra, dict), " of 'extra'")
    files, where = [], ""
    tensors = {}
    try:
        for number, made in enumerate(described["files"]):
            where = f"files[{number}]"
            files.append(FileRow(*made))
            _check_file(files[-1])
        for key, made in described["tensors"].items():
            where = f"tensors[{key!r}]"
            dtype, shape, flat = made
            row = tensors[key] = TensorRow(dtype, tuple(shape), _boxes(flat, len(shape)))
            _check(key, row, files)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error
    return Index(described["save_id"], described["world"], files, tensors, values, described["versions"])


def _check_kinds(described: dict[str, Any], kinds: Mapping[str, type], where: str) -> None:
    for key, kind in kinds.items():
        if type(described[key]) is not kind:
            raise ValueError(f"{key!r}{where} is {str(described[key])[:60]!r}, and no {kind.__name__}")


def _constants(described: Any, where: str = "") -> Iterator[str]:
    """Yields where there is NaN or an infinity, which Python reads as JSON and no save writes."""
    if isinstance(described, float) and not math.isfinite(described):
        yield f"{where}={described}"
    elif isinstance(described, (dict, list)):
        for key, value in described.items() if isinstance(described, dict) else enumerate(described):
            if isinstance(value, (dict, list, float)):
                yield from _constants(value, f"{where}[{key!r}]")


def _check_file(file: FileRow) -> None:
    if not FILE_NAME.fullmatch(file.name):
        raise ValueError(f"{file.name!r} is no name of a file in the folder")
    if not _are_lengths((file.nbytes, file.table, file.crc)):
        raise ValueError(f"{file.name} has {(file.nbytes, file.table, file.crc)!r}, which are no numbers of bytes")
    if file.nbytes != file.table + 4 * file.blocks:
        raise ValueError(f"{file.name} cannot have {file.nbytes} bytes with its table at {file.table}")


def _check(key: str, row: TensorRow, files: list[FileRow]) -> None:
    """Refuses boxes that are not within their files, or do not have every element of the tensor once."""
    refuse_uncovered(key, row.shape, ((box.offsets, box.sizes) for box in row.boxes))
    each = itemsize(row.dtype)
    for box in row.boxes:
        if not _are_lengths((box.file, box.offset, *box.item)):
            raise ValueError(f"a box of {key!r} is at {(box.file, box.offset, *box.item)!r}, which are no offsets")
        if not 0 <= box.file < len(files):
            raise ValueError(f"a box of {key!r} is in file number {box.file} of {len(files)}")
        file = files[box.file]
        start, length = box.item
        if not 0 <= start <= box.offset <= box.offset + box.numel * each <= start + length <= file.table:
            raise ValueError(f"a box of {key!r} is not within the {file.table} bytes of {file.name}")


def refuse_uncovered(key: str, shape: Sequence[int], boxes: Iterable[Cuboid]) -> None:
    """Raises ValueError unless every element of the tensor is in exactly one box.

    >>> refuse_uncovered("w", (4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
    >>> refuse_uncovered("w", (4, 2), [((0, 0), (3, 2)), ((2, 0), (1, 2))])
    Traceback (most recent call last):
    ...
    ValueError: boxes of 'w' overlap: ((2, 0), (1, 2)) and ((0, 0), (3, 2))
    """
    if not _are_lengths(shape):
        raise ValueError(f"{key!r} has the shape {shape!r}, which is none")
    numel, filled = 0, []
    for offsets, sizes in boxes:
        if not (_are_lengths(offsets) and _are_lengths(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise ValueError(f"a box of {key!r} is at {offsets!r}, {sizes!r} large, in a tensor of {shape}")
        if any(at + n > whole for at, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a box of {key!r} is at {offsets}, {sizes} large, in a tensor of {shape}")
        if own := prod(sizes):
            numel += own
            filled.append((offsets, sizes))
    if numel != prod(shape):
        raise ValueError(f"the boxes of {key!r} do not make up its shape {shape}")
    # They have as many elements as the tensor: none is missing where none is there twice.
    if len(filled) > 1:
        _refuse_overlap(key, filled, len(shape))


def _are_lengths(numbers: Sequence[int]) -> bool:
    return all(type(length) is int and length >= 0 for length in numbers)


def _refuse_overlap(key: str, boxes: list[Cuboid], ndim: int) -> None:
    """Raises ValueError if two boxes overlap. Sorts them along the dimension in which most of them begin at different
    places."""
    if not ndim:
        raise ValueError(f"boxes of {key!r} overlap: {boxes[1]} and {boxes[0]}")
    dim = max(range(ndim), key=lambda candidate: len({box[0][candidate] for box in boxes}))
    met: list[Cuboid] = []
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        met = [other for other in met if other[0][dim] + other[1][dim] > box[0][dim]]
        for other in met:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(other[0], other[1], box[0], box[1], strict=True)
            ):
                raise ValueError(f"boxes of {key!r} overlap: {box} and {other}")
        met.append(box)
