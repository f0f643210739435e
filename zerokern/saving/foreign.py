"""Opens any checkpoint: ours, torch.distributed.checkpoint's, DeepSpeed's universal one, a file of torch.save."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import StorageReader

from zerokern.core.errors import IoError
from zerokern.saving.foreign_torch import TorchFile, Universal, loaded, sorted_in, universal_folder
from zerokern.saving.index import NAME as INDEX_NAME
from zerokern.saving.index import Box, TensorRow
from zerokern.saving.pickled import Record, dcp_metadata
from zerokern.saving.published import METADATA, Published
from zerokern.saving.source import Foreign, Source

__all__ = ["Dcp", "Ours", "open_checkpoint"]

Told = Callable[[int], object]


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """What can be loaded from a folder or a file; nothing of the tensors is read yet, and nothing in it is run.

    >>> open_checkpoint("no such folder")
    Traceback (most recent call last):
    ...
    zerokern.core.errors.IoError: no such folder does not exist. No other checkpoint was ever published in it ...
    """
    place = Path(path)
    if place.is_file():
        _refuse_safetensors(place, [place])
        return TorchFile(place)
    if not (place / INDEX_NAME).exists():
        if (place / METADATA).is_file():
            return Dcp(place)
        if (converted := universal_folder(place)) is not None:
            return Universal(converted)
        if place.is_dir():
            _refuse_safetensors(place, sorted(place.glob("*.safetensors")))
            _refuse_unconverted(place)
    return Ours(Published.open(place))


class Ours(Source):
    """A checkpoint that zk.save published."""

    kind = "zerokern"

    def __init__(self, published: Published) -> None:
        self.published, self.path = published, published.folder
        self.tensors, self.values = published.index.tensors, published.index.values

    def storage_reader(self, on_progress: Told | None = None) -> StorageReader:
        from zerokern.saving.storage import Reader

        return Reader(self.published, on_progress)

    def damage(self, rank: int = 0, world: int = 1, on_progress: Told | None = None) -> Iterator[IoError]:
        from zerokern.saving.storage import Reader

        return Reader(self.published, on_progress).damage(rank, world)

    @property
    def nbytes(self) -> int:
        return sum(file.table for file in self.published.index.files)


class Dcp(Foreign):
    """A folder of torch.distributed.checkpoint: FSDP2, DTensor, plain tensors, of any number of ranks."""

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        metadata = dcp_metadata(path / METADATA)
        try:
            tensors, values = self._described(metadata)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IoError(
                f"{path / METADATA} was edited, or a torch wrote it that is newer than this zerokern: {error}",
                path=str(path / METADATA),
                errno=errno.EBADMSG,
            ) from error
        keys = sorted_in(self, set(tensors), {place: self._value(at, place) for place, at in values.items()})
        self.tensors |= {keys[place]: row for place, row in tensors.items() if place in keys}

    def _described(self, metadata: Record) -> tuple[dict[tuple[Any, ...], TensorRow], dict[tuple[Any, ...], Box]]:
        """Rows by path, with the boxes' items; other values by path, with theirs."""
        self.files: list[str] = []
        numbers: dict[str, int] = {}
        stored: dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]] = {}
        for at, where in metadata["storage_data"].items():
            name = str(where["relative_path"])
            if where.get("transform_descriptors"):
                raise ValueError(f"{name} was written through {where['transform_descriptors']}, which is not read here")
            if name in (".", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in the folder")
            if name not in numbers:
                numbers[name] = len(self.files)
                self.files.append(name)
            offset = at.get("offset")
            spot = (numbers[name], int(where["offset"]), int(where["length"]))
            stored[at["fqn"], None if offset is None else tuple(offset)] = spot
        self._check_lengths(stored.values())
        paths = metadata.get("planner_data") or {}
        tensors, values = {}, {}
        for key, one in metadata["state_dict_metadata"].items():
            place = tuple(paths[key]) if isinstance(paths, dict) and key in paths else (key,)
            if one.name.endswith("BytesStorageMetadata"):
                number, start, length = stored[key, None]
                values[place] = Box(number, start, (), (), (start, length))
                continue
            row = tensors[place] = TensorRow(_dtype(one["properties"]), tuple(one["size"]))
            for chunk in one["chunks"]:
                offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
                number, start, length = stored[key, offsets]
                row.boxes.append(Box(number, start, offsets, sizes, (start, length)))
        return tensors, values

    def _check_lengths(self, spots: Any) -> None:
        ends: dict[int, int] = {}
        for number, start, length in spots:
            ends[number] = max(ends.get(number, 0), start + length)
        for number, end in ends.items():
            file = self.path / self.files[number]
            found = os.stat(file).st_size if file.exists() else None
            if found is None or found < end:
                says = "is missing" if found is None else f"is truncated: it has {found:,} bytes of at least {end:,}"
                raise IoError(
                    f"{file} {says}. Restore it from a copy, or load another checkpoint",
                    path=str(file),
                    offset=found or 0,
                    errno=errno.ENOENT if found is None else errno.ENODATA,
                )

    def _item(self, box: Box, key: str) -> bytes:
        """The zip of one item, its checksums verified where torch has written them."""
        file = self.path / self.files[box.file]
        start, length = box.item
        with open(file, "rb") as stream:
            stream.seek(start)
            data = stream.read(length)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for entry in archive.infolist():
                    if entry.CRC:  # 0: the writer was told to leave it out
                        archive.read(entry)
        except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
            raise IoError(
                f"{file} at offset {start}, {length} bytes: {key} is damaged: {error}. Restore the file from a copy",
                path=str(file),
                offset=start,
                nbytes=length,
                errno=errno.EBADMSG,
                key=key,
            ) from error
        return data

    def _value(self, box: Box, place: tuple[Any, ...]) -> Any:
        key = ".".join(map(str, place))
        return loaded(io.BytesIO(self._item(box, key)), self.path / self.files[box.file], key)

    def _load(self, key: str, box: Box) -> Tensor:
        file = self.path / self.files[box.file]
        found = loaded(io.BytesIO(self._item(box, key)), file, key)
        return found if isinstance(found, Tensor) else torch.empty(0)


def _dtype(properties: Record) -> str:
    found = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(getattr(torch, str(found), None), torch.dtype):
        raise ValueError(f"{found!r} is no dtype")
    return str(found)


def _refuse_safetensors(path: Path, files: list[Path]) -> None:
    if files and all(file.suffix == ".safetensors" for file in files):
        raise IoError(
            f"{path} holds weights alone ({files[0].name}), no checkpoint: zk.load_pretrained(model, path) reads them",
            path=str(path),
            errno=errno.EINVAL,
        )


def _refuse_unconverted(path: Path) -> None:
    shards = [*path.glob("*zero_pp_rank_*_optim_states.pt"), *path.glob("*/*zero_pp_rank_*_optim_states.pt")]
    if shards:
        raise IoError(
            f"{path} is a checkpoint of DeepSpeed as its ranks wrote it ({shards[0].name}); it can be read once "
            "DeepSpeed has converted it: python -m deepspeed.checkpoint.ds_to_universal --input_folder PATH "
            "--output_folder OTHER",
            path=str(path),
            errno=errno.EINVAL,
        )
