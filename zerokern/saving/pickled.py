"""What a pickle of somebody else says, without running anything of it: every name in it becomes an inert record."""

from __future__ import annotations

import errno
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from zerokern.core.errors import IoError
from zerokern.saving.index import itemsize

__all__ = ["Record", "Stored", "dcp_metadata", "stored_tensor", "torch_file"]

DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
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


class Record:
    """An object of a class that is not made: what the pickle gives its constructor, and what it sets.

    >>> record = Record(3)
    >>> record.__setstate__({"offset": 5})
    >>> record.arguments, record["offset"]
    ((3,), 5)
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

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
    """A tensor that has not been read."""

    dtype: torch.dtype
    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Inert(pickle.Unpickler):
    """Makes containers, numbers, text and records; imports nothing and calls nothing."""

    def __init__(
        self, stream: IO[bytes], path: Path, allowed: frozenset[str] | None, stored: Callable | None = None
    ) -> None:
        super().__init__(stream)
        self.path, self.allowed, self.stored = path, allowed, stored

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return OrderedDict
        if full == "torch.Size":
            return tuple
        if module == "torch" and _is_dtype(name):
            return _Name(name)
        if self.stored is not None and module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return self.stored
        if self.allowed is not None and full not in self.allowed:
            raise IoError(
                f"{self.path} names {full}, which no index of torch.distributed.checkpoint needs: torch would run it. "
                "Nothing was run; do not load this checkpoint with anything unless you know who wrote it, and why",
                path=str(self.path),
                errno=errno.EPERM,
                key=full,
            )
        return type("Record", (Record,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        if self.stored is None:
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


def dcp_metadata(path: Path) -> Record:
    """The index of a checkpoint of torch.distributed.checkpoint as records."""
    with open(path, "rb") as stream:
        found = _load(Inert(stream, path, ALLOWED), path)
    if not isinstance(found, Record) or not isinstance(found.state, dict) or "state_dict_metadata" not in found.state:
        raise _damaged(path, "it holds no Metadata")
    return found


def torch_file(path: Path) -> Any:
    """What torch.save wrote, with a `Stored` in the place of each tensor and records for everything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = _data(archive)
            with archive.open(name) as stream:
                return _load(Inert(stream, path, None, _stored), path)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise _damaged(path, str(error)) from error


def stored_tensor(path: Path, stored: Stored) -> Tensor:
    """The tensor that stands for."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = bytearray(archive.read(f"{_data(archive).removesuffix('data.pkl')}data/{stored.storage}"))
        whole = torch.frombuffer(data, dtype=stored.dtype) if data else torch.empty(0, dtype=stored.dtype)
        return whole.as_strided(stored.size, stored.stride, stored.offset).clone()
    except (zipfile.BadZipFile, ValueError, KeyError, OSError, RuntimeError) as error:
        raise _damaged(path, str(error)) from error


def _data(archive: zipfile.ZipFile) -> str:
    names = [one for one in archive.namelist() if one.endswith("/data.pkl")]
    if len(names) != 1:
        raise ValueError("it is no file of torch.save")
    return names[0]


def _stored(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Stored:
    """As torch._utils._rebuild_tensor_v2 is called."""
    _, kind, key, *_ = storage
    return Stored(DTYPES[kind.name.rpartition(".")[2]], str(key), int(offset), tuple(size), tuple(stride))


def _load(unpickler: Inert, path: Path) -> Any:
    try:
        return unpickler.load()
    except IoError:
        raise
    # A damaged pickle raises whatever the operation that it happens to become raises.
    except Exception as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, why: str) -> IoError:
    return IoError(
        f"{path} was truncated or edited, or is something else: {why}. Restore it from a copy, or load another one",
        path=str(path),
        errno=errno.EBADMSG,
    )
