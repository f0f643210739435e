"""A checkpoint that can be loaded, whoever wrote it: tensors by our keys, values, a reader below torch's planner."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zerokern.core.errors import IoError, StateError
from zerokern.saving.index import Box, TensorRow, itemsize

__all__ = ["Foreign", "ForeignReader", "Source", "dtype_name"]

Told = Callable[[int], object]


class Source(ABC):
    """What `open_checkpoint` returns.

    `kind` is "zerokern", "dcp", "universal" or "torch". `tensors` has the keys `model.<name>`,
    `optim.state.<name>.<key>` and `extra.<n>...`; where `numbered` is true, the names of the optimizer state are
    numbers until `name_parameters` is called. `values` may have `groups` (by optimizer, then by group) and `extra`.
    """

    kind = ""
    path: Path
    tensors: dict[str, TensorRow]
    values: dict[str, Any]
    numbered = False

    @abstractmethod
    def storage_reader(self, on_progress: Told | None = None) -> StorageReader:
        """A reader for torch.distributed.checkpoint, which knows the tensors by our keys."""

    @abstractmethod
    def damage(self, rank: int = 0, world: int = 1, on_progress: Told | None = None) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the bytes."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes `damage` reads, on all ranks."""

    def verify(self, rank: int = 0, world: int = 1, on_progress: Told | None = None) -> None:
        """Reads this rank's share of the bytes, and raises the first thing that is wrong with them."""
        for error in self.damage(rank, world, on_progress):
            raise error

    def name_parameters(self, names: Sequence[Sequence[str]]) -> None:
        """Names numbered optimizer state: `names` are each optimizer's parameters, in the order of its groups."""
        if not self.numbered:
            return
        places = {str(n): one for n, one in enumerate(names[0])} if len(names) == 1 else {}
        places |= {f"{at}.{n}": one for at, some in enumerate(names) for n, one in enumerate(some)}
        states = [key for key in self.tensors if key.startswith("optim.state.")]
        parts = {key: key.removeprefix("optim.state.").rpartition(".") for key in states}
        lost = sorted({number for number, _, _ in parts.values()} - places.keys())
        if lost:
            raise StateError(
                f"{self.path} numbers the parameters of its optimizer, and has one with number {lost[0]}; what it is "
                f"loaded into has {sum(map(len, names))} parameters. Pass the same parameters in the same order"
            )
        self._renamed({key: f"optim.state.{places[number]}.{last}" for key, (number, _, last) in parts.items()})
        for some, groups in zip(names, self.values.get("groups", ()), strict=False):
            for group in groups:
                if all(isinstance(one, int) and one < len(some) for one in group.get("params", ())):
                    group["params"] = [some[one] for one in group.get("params", ())]
        self.numbered = False

    def _renamed(self, keys: dict[str, str]) -> None:
        self.tensors = {keys.get(key, key): row for key, row in self.tensors.items()}


class Foreign(Source):
    """A checkpoint of somebody else: `fetch` brings one box of one tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.values = {}, {}
        self.held: dict[str, Tensor] = {}  # small ones, which were read with the values that they stand among
        self._last: tuple[str, tuple[int, ...], Tensor] | None = None
        self._first: dict[str, str] = {}  # the key that `_load` knows, of those that were given names

    @abstractmethod
    def _load(self, key: str, box: Box) -> Tensor:
        """The box of the tensor with this key, on the host."""

    def storage_reader(self, on_progress: Told | None = None) -> StorageReader:
        return ForeignReader(self, on_progress)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.tensors.values())

    def hold(self, key: str, tensor: Tensor) -> None:
        """Takes in a tensor that is in memory already."""
        self.held[key] = tensor
        sizes = tuple(tensor.shape)
        self.tensors[key] = TensorRow(dtype_name(tensor.dtype), sizes, [Box(0, 0, (0,) * len(sizes), sizes, (0, 0))])

    def fetch(self, key: str, box: Box) -> Tensor:
        """One box, as it was described."""
        found = self.held[key] if key in self.held else self._load(self._first.get(key, key), box)
        row = self.tensors[key]
        if dtype_name(found.dtype) != row.dtype or tuple(found.shape) != box.sizes:
            raise IoError(
                f"{self.path}: {key} at {box.offsets} is {dtype_name(found.dtype)} of {tuple(found.shape)}; its index "
                f"says {row.dtype} of {box.sizes}. One of the two was exchanged: restore the checkpoint from a copy",
                path=str(self.path),
                key=key,
            )
        return found

    def kept(self, key: str, offsets: tuple[int, ...]) -> Tensor | None:
        """The box that was read last: one of many elements is asked for part by part, by one reader after another."""
        return self._last[2] if self._last is not None and self._last[:2] == (key, offsets) else None

    def keep(self, key: str, offsets: tuple[int, ...], found: Tensor | None) -> None:
        """Keep this box, and no other; None: none at all."""
        self._last = None if found is None else (key, offsets, found)

    def damage(self, rank: int = 0, world: int = 1, on_progress: Told | None = None) -> Iterator[IoError]:
        boxes = [(key, box) for key, row in self.tensors.items() for box in row.boxes]
        for key, box in boxes[rank::world]:
            try:
                self.fetch(key, box)
            except IoError as error:
                yield error
            if on_progress is not None:
                on_progress(box.numel * itemsize(self.tensors[key].dtype))

    def _renamed(self, keys: dict[str, str]) -> None:
        super()._renamed(keys)
        self._last = None
        self._first |= {new: key for key, new in keys.items()}
        self.held = {keys.get(key, key): tensor for key, tensor in self.held.items()}


class ForeignReader(StorageReader):
    """Reads box by box; each is held until the next is read, of which this or another reader copies parts."""

    def __init__(self, source: Foreign, on_progress: Told | None = None) -> None:
        super().__init__()
        self.source = source
        self._told = on_progress or (lambda nbytes: None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: the checkpoint is open."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors in torch's words."""
        rows: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(getattr(torch, row.dtype)),
                torch.Size(row.shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in row.boxes],
            )
            for key, row in self.source.tensors.items()
        }
        return Metadata(rows, storage_meta=StorageMeta(checkpoint_id=str(self.source.path)))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: what there is is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Returns when every item of the plan is in its place."""
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault((item.storage_index.fqn, tuple(item.storage_index.offset or ())), []).append(item)
        source = self.source
        for (key, offset), items in sorted(wanted.items(), key=lambda one: source.kept(*one[0]) is None):
            found = source.kept(key, offset)
            if found is None:
                source.keep(key, offset, None)  # before the next is read: two would be twice the memory
                box = next(one for one in source.tensors[key].boxes if one.offsets == offset)
                found = source.fetch(key, box)
                source.keep(key, offset, found)
                self._told(found.numel() * found.element_size())
            for item in items:
                self._copy(key, found, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _copy(self, key: str, found: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.dtype is not found.dtype or target.shape != found.shape:
            raise StateError(
                f"{key} is {found.dtype} of {tuple(found.shape)} in {self.source.path}; what it is to be read into is "
                f"{target.dtype} of {tuple(target.shape)}. Read it into room of its own dtype, and convert it there"
            )
        target.copy_(found)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype within torch.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
