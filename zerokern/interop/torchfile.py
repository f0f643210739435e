"""Reads pickles and files of torch.save without importing or running anything that they name.

torch.load(weights_only=True) creates the values. But it trusts the numbers in a pickle: ten bytes request a tensor or a
bytearray of 2 GB; a storage is as long as the pickle says, whatever its record has; a compressed record is mapped as if
it were not; no checksum is compared. So the pickle is first read here, with records in place of objects.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import pickletools
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.torch_zip import STORAGES
from zerokern.core.errors import BudgetError, IoError
from zerokern.core.units import itemsize
from zerokern.io.advice import file_error
from zerokern.memory.room import amount, memory_left

__all__ = [
    "BROKEN", "Archive", "PickledObject", "StoredTensor", "damaged_error", "dcp_metadata", "load_restricted",
    "read_pickle",
]  # fmt: skip

DTYPES = STORAGES | {
    "UntypedStorage": torch.uint8, "QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
}  # fmt: skip
MOST_NAMES = 1000  # of classes in one pickle: each takes a thousand bytes, however short its name is
MOST_DIMENSIONS = 256
MOST_TEXT = 64 << 20  # bytes of a pickle that is longer than the file which it lies compressed in
PIECE = 1 << 20
LEGACY = 5  # pickles at the beginning of a file without a zip: magic number, protocol, machine, content, storages
# What reading a damaged zip may raise, RuntimeError where its flags say that it is encrypted.
BROKEN = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError, RuntimeError)
SIZED = ("bytearray", "Tensor", "Parameter", "Storage")  # torch's own reader makes these of a number: a length
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
    | {f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local")
       for kind in ("", "Posix", "PurePosix", "Windows")}
)  # fmt: skip


class PickledObject:
    """A record in place of an object of a pickle: its constructor's arguments and its state.

    >>> record = PickledObject(3)
    >>> record.__setstate__({"offset": 5})
    >>> record.arguments, record["offset"]
    ((3,), 5)
    """

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        if self.name.endswith(SIZED) and any(type(argument) is int for argument in arguments):
            raise ValueError(f"{self.name}{arguments[:4]} has so many elements, and none of them is in the file")
        # torch's reader copies what an object is made of: the same list again and again, if the file says so.
        self.spend(
            sum(len(argument) for argument in (arguments, *arguments) if isinstance(argument, list | tuple | dict))
        )
        self.arguments = arguments

    def spend(self, count: int) -> None:
        """Counts elements against the number that the file can contain."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drops an item of an object that is some kind of dict."""

    def append(self, value: Any) -> None:
        """Drops an item of an object that is some kind of list."""

    def __getitem__(self, key: str) -> Any:
        if not isinstance(self.state, dict) or key not in self.state:
            raise KeyError(f"{self.name or 'a record'} has no {key}")
        return self.state[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read: its elements lie in a storage."""

    dtype: torch.dtype
    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class DtypeName(str):
    """A dtype by its name. Pickles write it as a global of torch."""

    __slots__ = ()


class InertUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers, text and records only; it imports nothing and calls nothing.

    `records`: how many bytes each storage has in the file, by its name, where that is known.
    """

    def __init__(
        self, data: bytes, path: Path, allowed: frozenset[str] | None, records: Mapping[str, int] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.path, self.allowed, self.records = path, allowed, records
        self._classes: dict[str, type[PickledObject]] = {}
        self._left = len(data)  # a pickle has more bytes than elements, unless it names some of them again and again

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return lambda: OrderedDict()
        if full == "torch.Size":
            return _size
        if module == "torch" and _is_dtype(name):
            return DtypeName(name)
        if self.allowed is None and module == "torch._utils":
            if name.startswith("_rebuild_tensor"):
                return self._stored
            if name.startswith("_rebuild_parameter"):
                return lambda data, *_: data
        if self.allowed is not None and full not in self.allowed:
            raise file_error(
                self.path,
                f"names {full}, which no index of torch.distributed.checkpoint needs: torch would run it. "
                "Nothing was run; do not load this checkpoint with anything unless you know who wrote it, and why",
                errno.EPERM,
                key=full,
            )
        if full not in self._classes:
            if len(self._classes) == MOST_NAMES:
                raise ValueError(f"it names more than {MOST_NAMES} classes")
            self._classes[full] = type("PickledObject", (PickledObject,), {"name": full, "spend": self._spend})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        if self.allowed is not None:
            raise pickle.UnpicklingError("an index refers to no storages")
        return pid

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it is made of more elements than it has bytes")

    def _stored(self, storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> StoredTensor:
        """Takes the place of torch._utils._rebuild_tensor and its kind; the third version gets a dtype."""
        _, kind, key, _, count, *_ = storage
        named = next((argument for argument in more if isinstance(argument, DtypeName)), None)
        dtype = DTYPES[kind.name.rpartition(".")[2]] if named is None else getattr(torch, named)
        stored = StoredTensor(dtype, str(key), offset, _size(size), _size(stride))
        if any(type(number) is not int or number < 0 for number in (count, offset, *stored.size, *stored.stride)):
            raise ValueError(f"a tensor has the size {stored.size} at {offset}")
        nbytes = count if named is not None else count * dtype.itemsize
        there = nbytes if self.records is None else self.records.get(stored.storage)
        if there != nbytes:
            says = "is not there" if there is None else f"has {there} bytes"
            raise ValueError(f"record {stored.storage} is to have {nbytes} bytes, and {says}")
        last = offset + sum((n - 1) * step for n, step in zip(stored.size, stored.stride, strict=True))
        if all(stored.size) and (last + 1) * dtype.itemsize > nbytes:
            raise ValueError(f"a tensor of {stored.size} reaches beyond the {nbytes} bytes of its record")
        return stored


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(sizes)} dimensions")
    return tuple(sizes)


def _is_dtype(name: str) -> bool:
    try:
        return itemsize(name) > 0
    except ValueError:
        return False


def read_pickle(
    data: bytes, path: Path, allowed: frozenset[str] | None = None, records: Mapping[str, int] | None = None
) -> Any:
    """Returns the content of a pickle of `path`: a `StoredTensor` for each tensor, records for all other objects.

    `allowed`: the only class names that may occur in it.
    """
    try:
        for operation, argument, at in pickletools.genops(data):
            # Python's reader makes room for all places of its memo up to this one: 12 bytes would take 4 GB.
            if operation.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(data):
                raise ValueError(f"byte {at} fills place {argument} of a memo, and {len(data)} bytes cannot")
        return InertUnpickler(data, path, allowed, records).load()
    except IoError:
        raise
    # A damaged pickle raises whatever the operation that it happens to become raises.
    except Exception as error:
        raise damaged_error(path, f"{type(error).__name__}: {error}") from error


def dcp_metadata(data: bytes, path: Path) -> PickledObject:
    """Returns the index of a checkpoint of torch.distributed.checkpoint, the bytes of `path`, as records."""
    metadata = read_pickle(data, path, ALLOWED)
    if (
        not isinstance(metadata, PickledObject)
        or not isinstance(metadata.state, dict)
        or "state_dict_metadata" not in metadata.state
    ):
        raise damaged_error(path, "it holds no Metadata")
    return metadata


def damaged_error(path: Path, why: str) -> IoError:
    """Returns the error for a file that cannot be what its writer wrote."""
    return file_error(
        path, f"was truncated or edited, or is something else: {why}. Restore it from a copy, or load another one"
    )


def load_restricted(file: Any, path: Path, key: str = "", *, mapped: bool = False) -> Any:
    """Returns tensors and plain values that torch.save wrote. Another class is refused by name, not imported."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object of {match[1]}" if match else "what is no tensor and no plain value"
        says = f"holds {what}, and loading that would run its code; nothing was run. Save state_dicts and plain"
        does = "values, with torch.save where that class is known, and load that file"
        raise _unreadable(path, key, f"{says} {does}", errno.EPERM) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        says = f"is truncated, damaged or no file of torch.save: {first}. Restore it from a copy"
        raise _unreadable(path, key, says, errno.EBADMSG) from error


def _unreadable(path: Path, key: str, says: str, number: int) -> IoError:
    return IoError(f"{path}: {key or 'it'} {says}", path=str(path), errno=number, key=key or None)


class Archive:
    """A file of torch.save; `content` is what its pickle says, with a `StoredTensor` in the place of each tensor.

    `mapped`: whether its tensors can stay in the file. `has_checksums`: whether every record has a checksum; files from
    before torch 1.6 are not zips and have none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/a.pt")
    ...     archive = Archive(Path(folder, "a.pt"))
    >>> archive.mapped, archive.content["w"].size
    (True, (2,))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = self.has_checksums = False
        self._root = ""  # the folder of all records within a zip
        self._checked: set[str] = set()
        self._zip: zipfile.ZipFile | None = None  # open from the first check on: its directory is read once
        try:
            zipped = zipfile.is_zipfile(path)
        except zipfile.BadZipFile as error:
            raise damaged_error(path, str(error)) from error
        self.content: Any = self._read_zip() if zipped else self._read_legacy()
        self.close()

    def close(self) -> None:
        """Closes the file until the next check."""
        zipped, self._zip = self._zip, None
        if zipped is not None:
            zipped.close()

    def values(self, key: str = "") -> Any:
        """Returns what torch.load reads from it."""
        return load_restricted(self.path, self.path, key, mapped=self.mapped)

    def check(self, stored: Any, key: str) -> None:
        """Compares the checksum of this tensor's record, once; raises if it is damaged."""
        if not isinstance(stored, StoredTensor) or stored.storage in self._checked or not self._root:
            return
        with self._open(key) as archive, archive.open(self._record(stored)) as record:
            while record.read(PIECE):  # the last one compares
                pass
        self._checked.add(stored.storage)

    def tensor(self, stored: StoredTensor, key: str) -> Tensor:
        """Reads one tensor, its checksum compared."""
        with self._open(key) as archive:
            data = bytearray(archive.read(self._record(stored)))
        whole = torch.frombuffer(data, dtype=stored.dtype) if data else torch.empty(0, dtype=stored.dtype)
        return whole.as_strided(stored.size, stored.stride, stored.offset)

    def _record(self, stored: StoredTensor) -> str:
        return f"{self._root}data/{stored.storage}"

    def _read_zip(self) -> Any:
        with self._open() as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            names = [name for name in entries if name.endswith("/data.pkl")]
            if len(names) != 1 or len(entries) != len(archive.infolist()):
                raise ValueError("it is no file of torch.save")
            self._root = names[0].removesuffix("data.pkl")
            self.mapped = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.values())
            self.has_checksums = all(hasattr(entry, "CRC") or not entry.file_size for entry in entries.values())
            size = os.stat(self.path).st_size
            stored = sum(entry.compress_size for entry in entries.values())
            if stored > size or (
                self.mapped and any(entry.file_size != entry.compress_size for entry in entries.values())
            ):
                raise ValueError(f"its records take {stored} bytes, and it has {size}")
            if not self.mapped:
                self._refuse_without_room(size, sum(entry.file_size for entry in entries.values()))
            if entries[names[0]].file_size > size + MOST_TEXT:
                raise ValueError(f"its pickle takes {entries[names[0]].file_size} bytes, and the file has {size}")
            data = f"{self._root}data/"
            records = {
                name.removeprefix(data): entry.file_size for name, entry in entries.items() if name.startswith(data)
            }
            return read_pickle(archive.read(names[0]), self.path, records=records)

    def _refuse_without_room(self, size: int, unpacked: int) -> None:
        """Raises if a compressed file does not fit into memory when unpacked: a few megabytes can claim to be
        gigabytes."""
        left = min(memory_left().values(), default=unpacked)
        if unpacked > left:
            raise BudgetError(
                f"{self.path} has {amount(size)}, is compressed and takes {amount(unpacked)} unpacked, which is more "
                f"than there is ({amount(left)}). Repack it without compression (zip -0): then it is read in place"
            )

    def _read_legacy(self) -> Any:
        pickles = []
        try:
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for _ in range(LEGACY):
                    begin = data.tell()
                    for _operation in pickletools.genops(data):  # type: ignore[arg-type]  # it reads like a file
                        pass
                    pickles.append(read_pickle(data[begin : data.tell()], self.path))
        except ValueError as error:
            raise damaged_error(self.path, str(error)) from error
        return pickles[3]

    @contextmanager
    def _open(self, key: str = "") -> Iterator[Any]:
        try:
            if self._zip is None:
                self._zip = zipfile.ZipFile(self.path)
                for entry in self._zip.infolist():
                    if not entry.CRC:  # its writer was told to leave it out: nothing is compared with what is not there
                        del entry.CRC
            yield self._zip
        except (IoError, BudgetError):
            raise
        except BROKEN as error:
            damage = damaged_error(self.path, f"{key}: {error}" if key else str(error))
            damage.key = key or None
            raise damage from error
