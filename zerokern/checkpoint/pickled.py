"""What a pickle of somebody else says, without running anything of it: every name in it becomes an inert record.

Python's reader takes a number in the pickle at its word. Twelve bytes that put something at place 2^28 of its memo
take 4 GB: so the operations are looked at before they are carried out.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerokern.checkpoint.index import itemsize, unfit
from zerokern.core.errors import IoError

__all__ = ["Stored", "Unmade", "damaged", "dcp_metadata", "end_of", "inert"]

STOP = ord(".")
# Runs of operations whose length is known by their first byte, and which take as much memory as their own bytes.
PLAIN = re.compile(
    rb"(?:[(012NRabd}el\]ost)uQ\x81\x85-\x89\x8f-\x94\x97\x98]"
    rb"|[Khq\x80\x82].|[M\x83].{2}|[Jj\x84].{4}|[G\x95].{8}){1,4096}",
    re.DOTALL,
)
COUNTED = {  # how many bytes say how many bytes follow
    b"U": 1, b"\x8c": 1, b"C": 1, b"\x8a": 1,
    b"T": 4, b"X": 4, b"B": 4, b"\x8b": 4,
    b"\x8d": 8, b"\x8e": 8, b"\x96": 8,
}  # fmt: skip
LINES = {b"I": 1, b"L": 1, b"F": 1, b"S": 1, b"V": 1, b"g": 1, b"P": 1, b"c": 2, b"i": 2}
PUT, LONG_BINPUT = b"p", b"r"

STORAGES = {  # classes of storages by name; all other dtypes lie in an untyped one
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
DTYPES = STORAGES | {
    "UntypedStorage": torch.uint8, "QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
}  # fmt: skip
MOST_NAMES = 1000  # of classes in one pickle: each takes a thousand bytes, however short its name is
MOST_DIMENSIONS = 256
# What torch's own reader calls, and what takes a number for a length.
SIZED = ("bytearray", "Tensor", "Parameter", "Storage")
PATHS = ("pathlib", "pathlib._local")
DCP = "torch.distributed.checkpoint."
# What torch.distributed.checkpoint has written into .metadata, from torch 2.1 on.
ALLOWED = frozenset(
    {f"{DCP}metadata.{name}" for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )}
    | {f"{DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")}
    | {f"{DCP}_hf_utils._HFStorageInfo", "torch.distributed._shard.sharded_tensor.metadata.TensorProperties"}
    | {"torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING", "torch.serialization._get_layout"}
    | {f"{module}.{kind}Path" for module in PATHS for kind in ("", "Posix", "PurePosix", "Windows")}
)  # fmt: skip


class Unmade:
    """An object of a class that is not made: what the pickle gives its constructor, and what it sets.

    >>> record = Unmade(3)
    >>> record.__setstate__({"offset": 5})
    >>> record.arguments, record["offset"]
    ((3,), 5)
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        if self.name.endswith(SIZED) and any(type(one) is int for one in arguments):
            raise ValueError(f"{self.name}{arguments[:4]} has so many elements, and none of them is in the file")
        # Who reads this after us copies what it is made of: the same list again and again, if the file says so.
        self.spend(sum(len(one) for one in (arguments, *arguments) if isinstance(one, list | tuple | dict)))
        self.arguments = arguments

    def spend(self, count: int) -> None:
        """Takes that many elements from what its file can have asked for."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a dict or a list of another class: nobody asks what is in it."""

    def append(self, value: Any) -> None:
        """The same."""

    def __getitem__(self, key: str) -> Any:
        return self.get(key) if isinstance(self.state, dict) and key in self.state else _missing(self.name, key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read: its elements lie in a storage of `nbytes`."""

    dtype: torch.dtype
    storage: str
    nbytes: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """How many bytes of its storage it reaches over; its numbers are those of the file and may be anything."""
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.size) else 0


class Inert(pickle.Unpickler):
    """Makes containers, numbers, text and records; imports nothing and calls nothing."""

    def __init__(self, data: bytes, path: Path, allowed: frozenset[str] | None) -> None:
        super().__init__(io.BytesIO(data))
        self.path, self.allowed = path, allowed
        self._records: dict[str, type[Unmade]] = {}
        self._left = len(data)  # a pickle has more bytes than elements, unless it names some of them again and again

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return _ordered
        if full == "torch.Size":
            return _size
        if module == "torch" and _is_dtype(name):
            return _Name(name)
        if self.allowed is None and module == "torch._utils" and name in _REBUILT:
            return _REBUILT[name]
        if self.allowed is not None and full not in self.allowed:
            raise unfit(
                self.path,
                f"names {full}, which no index of torch.distributed.checkpoint needs: torch would run it. "
                "Nothing was run; do not load this checkpoint with anything unless you know who wrote it, and why",
                errno.EPERM,
                key=full,
            )
        if full not in self._records:
            if len(self._records) == MOST_NAMES:
                raise ValueError(f"it names more than {MOST_NAMES} classes")
            self._records[full] = type("Unmade", (Unmade,), {"name": full, "spend": self._spend})
        return self._records[full]

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it is made of more elements than it has bytes")

    def persistent_load(self, pid: Any) -> Any:
        if self.allowed is not None:
            raise pickle.UnpicklingError("an index refers to no storages")
        return pid


class _Name(str):
    """A dtype by its name. Pickles write it as a global of torch."""

    __slots__ = ()


def _missing(name: str, key: str) -> Any:
    raise KeyError(f"{name or 'a record'} has no {key}")


def _is_dtype(name: str) -> bool:
    try:
        return itemsize(name) > 0
    except ValueError:
        return False


def dcp_metadata(data: bytes, path: Path) -> Unmade:
    """The index of a checkpoint of torch.distributed.checkpoint, the bytes of `path`, as records."""
    found = inert(data, path, ALLOWED)
    if not isinstance(found, Unmade) or not isinstance(found.state, dict) or "state_dict_metadata" not in found.state:
        raise damaged(path, "it holds no Metadata")
    return found


def inert(data: bytes, path: Path, allowed: frozenset[str] | None = None) -> Any:
    """What a pickle of `path` says: a `Stored` in the place of each tensor, records for everything else."""
    try:
        end_of(data)
        return Inert(data, path, allowed).load()
    except IoError:
        raise
    # A damaged pickle raises whatever the operation that it happens to become raises.
    except Exception as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def damaged(path: Path, why: str) -> IoError:
    """What is said of a file that cannot be what its writer wrote."""
    return unfit(
        path, f"was truncated or edited, or is something else: {why}. Restore it from a copy, or load another one"
    )


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(sizes)} dimensions")
    return tuple(sizes)


def _stored(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Stored:
    """As torch._utils._rebuild_tensor_v2 is called."""
    _, kind, key, _, numel, *_ = storage
    dtype = DTYPES[kind.name.rpartition(".")[2]]
    return Stored(dtype, str(key), numel * dtype.itemsize, offset, _size(size), _size(stride))


def _stored_as(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> Stored:
    """As torch._utils._rebuild_tensor_v3 is called, for dtypes whose storages have no class of their own."""
    _, _, key, _, nbytes, *_ = storage
    return Stored(getattr(torch, more[2]), str(key), nbytes, offset, _size(size), _size(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


_REBUILT = {
    "_rebuild_tensor": _stored,
    "_rebuild_tensor_v2": _stored,
    "_rebuild_tensor_v3": _stored_as,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
}


def end_of(data: Any, begin: int = 0) -> int:
    """Where the pickle in these bytes that begins there ends; ValueError where it asks for more than there can be.

    >>> end_of(b"\\x80\\x02K\\x05.and more")
    5
    >>> end_of(b"\\x80\\x02Nr\\xff\\xff\\xff\\x0f.")
    Traceback (most recent call last):
    ...
    ValueError: byte 3 puts something at place 268435455 of a memo, and 9 bytes cannot fill so many
    """
    at, size = begin, len(data)
    while at < size:
        if (run := PLAIN.match(data, at)) is not None:
            at = run.end()
            continue
        if data[at] == STOP:
            return at + 1
        operation, first = data[at : at + 1], at + 1
        if operation in COUNTED:
            width = COUNTED[operation]
            at = first + width + int.from_bytes(data[first : first + width], "little")
        elif operation in LINES:
            at = first
            for _ in range(LINES[operation]):
                at = data.find(b"\n", at) + 1 or size + 1
        elif operation == LONG_BINPUT:
            _refuse_beyond(int.from_bytes(data[first : first + 4], "little"), first - 1, size)
            at = first + 4
        elif operation == PUT:
            at = data.find(b"\n", first) + 1 or size + 1
            _refuse_beyond(int(data[first : at - 1]), first - 1, size)
        else:
            raise ValueError(f"byte {at} is no operation of a pickle")
    raise ValueError(f"the pickle does not end within its {size - begin} bytes")


def _refuse_beyond(place: int, at: int, size: int) -> None:
    if not 0 <= place <= size:
        raise ValueError(f"byte {at} puts something at place {place} of a memo, and {size} bytes cannot fill so many")
