"""Opens checkpoints of others: torch.distributed.checkpoint's, DeepSpeed's universal one, a file of torch.save."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.checkpoint.archive import BROKEN
from zerokern.checkpoint.index import NAME as INDEX_NAME
from zerokern.checkpoint.index import Box, TensorRow, itemsize, refuse_uncovered, unfit
from zerokern.checkpoint.pickled import Unmade, dcp_metadata
from zerokern.checkpoint.published import DATA, METADATA, likeness
from zerokern.checkpoint.source import Foreign, Source
from zerokern.core.errors import IoError
from zerokern.interop.foreign_torch import TorchFile, Universal, loaded, sorted_in, universal_folder

__all__ = ["Dcp", "open_foreign"]

MOST_PARTS = 256  # of a name: how deep a dictionary is nested


def open_foreign(place: Path) -> Source | None:
    """What others have written at a place; None where that is nothing known. A folder of weights alone is refused.

    >>> open_foreign(Path("no such folder")) is None
    True
    """
    if place.is_file():
        _refuse_safetensors(place, [place])
        return TorchFile(place)
    if (place / METADATA).is_file():
        return Dcp(place)
    if (converted := universal_folder(place)) is not None:
        return Universal(converted)
    if place.is_dir():
        _refuse_safetensors(place, sorted(place.glob("*.safetensors")))
        _refuse_unconverted(place)
    return None


class Dcp(Foreign):
    """A folder of torch.distributed.checkpoint: FSDP2, DTensor, plain tensors, of any number of ranks."""

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        metadata = dcp_metadata((path / METADATA).read_bytes(), path / METADATA)
        try:
            tensors, values = self._described(metadata)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise unfit(
                path / METADATA, f"was edited, or a torch wrote it that is newer than this zerokern: {error}"
            ) from error
        keys = sorted_in(self, set(tensors), {place: self._value(at, place) for place, at in values.items()})
        self.tensors |= {keys[place]: row for place, row in tensors.items() if place in keys}

    def _described(self, metadata: Unmade) -> tuple[dict[tuple[Any, ...], TensorRow], dict[tuple[Any, ...], Box]]:
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
            if min(spot) < 0:
                raise ValueError(f"an item of {name} is at {spot[1]}, {spot[2]} bytes long")
            stored[at["fqn"], None if offset is None else tuple(offset)] = spot
        self._refuse_our_own()
        self._check_lengths(stored.values())
        paths = metadata.get("planner_data") or {}
        tensors: dict[tuple[Any, ...], TensorRow] = {}
        values: dict[tuple[Any, ...], Box] = {}
        for key, one in metadata["state_dict_metadata"].items():
            place = tuple(paths[key]) if isinstance(paths, dict) and key in paths else (key,)
            if len(place) > MOST_PARTS:
                raise ValueError(f"the name of {key!r} has {len(place)} parts")
            if place in tensors or place in values:
                raise ValueError(f"two of its tensors are called {'.'.join(map(str, place))}")
            if one.name.endswith("BytesStorageMetadata"):
                number, start, length = stored[key, None]
                values[place] = Box(number, start, (), (), (start, length))
                continue
            row = tensors[place] = TensorRow(_dtype(one["properties"]), tuple(one["size"]))
            if len(one["chunks"]) > len(stored):
                raise ValueError(f"{key!r} is in {len(one['chunks'])} boxes, and {len(stored)} are stored in all")
            boxes = [(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in one["chunks"]]
            refuse_uncovered(key, row.shape, boxes)
            each = itemsize(row.dtype)
            for offsets, sizes in boxes:
                box = Box(*stored[key, offsets][:2], offsets, sizes, stored[key, offsets][1:])
                if box.numel * each > box.item[1]:
                    raise ValueError(f"{key!r} at {offsets} is {sizes} large, and has {box.item[1]} bytes")
                row.boxes.append(box)
        return tensors, values

    def _refuse_our_own(self) -> None:
        """What zk.save wrote, seen through torch's index alone: tensors without checksums, and nothing of the rest."""
        ours = next((name for name in self.files if DATA.fullmatch(name)), None)
        if ours is not None:
            raise IoError(
                f"{self.path} is a checkpoint of zk.save ({ours}) without its {INDEX_NAME}, which has the checksums, "
                "the optimizer's options and counters, extra and the random state: without them training would go on "
                "from somewhere else. Restore that file from a copy, or load another checkpoint; the tensors alone "
                "are read by torch.distributed.checkpoint.load",
                path=str(self.path / INDEX_NAME),
                errno=errno.ENOENT,
            )

    def _check_lengths(self, spots: Any) -> None:
        ends: dict[int, int] = {}
        for number, start, length in spots:
            ends[number] = max(ends.get(number, 0), start + length)
        for number, end in ends.items():
            file = self.path / self.files[number]
            found = os.stat(file).st_size if file.exists() else None
            if found is None or found < end:
                says = "is missing" if found is None else f"is truncated: it has {found:,} bytes of at least {end:,}"
                raise unfit(
                    file,
                    f"{says}. Restore it from a copy, or load another checkpoint",
                    errno.ENOENT if found is None else errno.ENODATA,
                    offset=found or 0,
                )

    def likeness(self) -> str:
        return f"files with the digest {likeness([self.path / name for name in (METADATA, *self.files)])}"

    def _item(self, box: Box, key: str) -> bytes:
        """The zip of one item, its checksums verified where torch has written them."""
        file = self.path / self.files[box.file]
        start, length = box.item
        with open(file, "rb") as stream:
            stream.seek(start)
            data = stream.read(length)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                says = sum(entry.file_size for entry in archive.infolist())
                if says > length:  # torch compresses nothing
                    raise zipfile.BadZipFile(f"what is packed in it says that it has {says:,} bytes")
                for entry in archive.infolist():
                    if entry.CRC:  # 0: the writer was told to leave it out
                        archive.read(entry)
                    self.summed &= bool(entry.CRC or not entry.file_size)
        except BROKEN as error:
            raise unfit(
                file,
                f"at offset {start}, {length} bytes: {key} is damaged: {error}. Restore the file from a copy",
                offset=start,
                nbytes=length,
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


def _dtype(properties: Unmade) -> str:
    found = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(getattr(torch, str(found), None), torch.dtype):
        raise ValueError(f"{found!r} is no dtype")
    return str(found)


def _refuse_safetensors(path: Path, files: list[Path]) -> None:
    if files and all(file.suffix == ".safetensors" for file in files):
        raise unfit(
            path,
            f"holds weights alone ({files[0].name}), no checkpoint: zk.load_pretrained(model, path) reads them",
            errno.EINVAL,
        )


def _refuse_unconverted(path: Path) -> None:
    shards = [*path.glob("*zero_pp_rank_*_optim_states.pt"), *path.glob("*/*zero_pp_rank_*_optim_states.pt")]
    if shards:
        raise unfit(
            path,
            f"is a checkpoint of DeepSpeed as its ranks wrote it ({shards[0].name}); it can be read once "
            "DeepSpeed has converted it: python -m deepspeed.checkpoint.ds_to_universal --input_folder PATH "
            "--output_folder OTHER",
            errno.EINVAL,
        )
