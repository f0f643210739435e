"""Our part of a save by torch.distributed.checkpoint: its planner, who writes which box, and the files they go into."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnyPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object

from zerokern.checkpoint.archive import ALIGN, envelope
from zerokern.checkpoint.files import FileWriter, pieces
from zerokern.checkpoint.folder import Draft
from zerokern.checkpoint.index import Box, FileRow, Index, TensorRow
from zerokern.checkpoint.layout import Within, folded, index_of
from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.source import Told, dtype_name, untold
from zerokern.checkpoint.staging import BLOCK
from zerokern.core.errors import IoError, StateError
from zerokern.io.ticket import again
from zerokern.memory.here import Here, write_items

__all__ = ["OnDiskPart", "SavePlanner", "Writer"]

STATE = "optim.state."
STEP = 64 * BLOCK  # bytes between two reports of progress
AROUND = 1024  # bytes that an envelope and the gap behind it take, at most


class OnDiskPart:
    """One tensor of state that lies on disk, as something to be saved: read when it is written, never all at once.

    `order` says in which order items are best asked for: that of the records, each of which is read once then.
    """

    def __init__(self, here: Here, key: str, column: Any) -> None:
        self.column, self.dtype, self.shape = column, column.dtype, here.of(key).shape
        self._places = {
            at: (place, first, sizes)
            for place in column.places
            for at, sizes, first in here.within(place.start, place.numel).of(key).boxes()
        }

    def size(self) -> torch.Size:
        """As a tensor's."""
        return self.shape

    def or_empty(self) -> OnDiskPart | Tensor:
        """Itself; where the whole tensor has no elements, and so lies nowhere, one that is saved like any other."""
        return self if self.shape.numel() else torch.empty(self.shape, dtype=self.dtype, device="cpu")

    @property
    def nbytes(self) -> int:
        """Of what is here."""
        return sum(prod(sizes) for _, _, sizes in self._places.values()) * self.dtype.itemsize

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        cuboids = [(at, sizes, first) for at, (_, first, sizes) in self._places.items()]
        return write_items(fqn, self.shape, self.dtype, cuboids)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """A view of memory that holds it until a few more have been asked for."""
        place, first, sizes = self._places[tuple(index.offset or ())]
        flat = self.column.read(place)
        return flat[first : first + prod(sizes)].view(sizes)

    def record(self, index: MetadataIndex) -> Any:
        """Where it lies."""
        return self._places[tuple(index.offset or ())][0].record

    def order(self, index: MetadataIndex) -> tuple[int, ...]:
        """Sorts items by where they lie."""
        place, first, _ = self._places[tuple(index.offset or ())]
        return (*self.column.order(place), first)


class SavePlanner(DefaultSavePlanner):
    """torch's, for a flat dict of items, among them parts that lie on disk: these come first, in their order.

    What each rank has whole, one of them writes: of the parameters that an optimizer steps some each, everything else
    of a model the first, for buffers that ranks count by themselves must not be a mixture of theirs.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what."""
        return super().create_global_plan(_undivided(all_plans))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """In the order in which items are best written."""
        plan = super().finish_plan(new_plan)
        near: list[WriteItem] = []
        far: list[tuple[Any, WriteItem]] = []
        asked: dict[Any, list[Any]] = {}
        for item in plan.items:
            source = self.state_dict[item.index.fqn]
            if isinstance(source, OnDiskPart):
                far.append(((id(source.column.home), *source.order(item.index)), item))
                asked.setdefault(source.column.stream, []).append(source.record(item.index))
            else:
                near.append(item)
        for stream, records in asked.items():  # replicated state is written by one of those who have it
            stream.expect(records)
        items = [*(item for _, item in sorted(far, key=lambda pair: pair[0])), *near]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item is made of."""
        item = self.state_dict[index.fqn]
        if isinstance(item, OnDiskPart):
            return item.__get_tensor_shard__(index)
        return find_state_dict_object(self.state_dict, index).detach()


def _undivided(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans, where only the first rank that has it writes a tensor of the model that no optimizer steps."""
    names = {item.index.fqn for plan in plans for item in plan.items}
    stepped = {f"model.{key.removeprefix(STATE).rpartition('.')[0]}" for key in names if key.startswith(STATE)}
    taken: set[MetadataIndex] = set()
    made = []
    for plan in plans:
        own = {
            item.index
            for item in plan.items
            if item.type is WriteItemType.TENSOR
            and item.index.fqn.startswith("model.")
            and item.index.fqn not in stepped
        }
        made.append(replace(plan, items=[one for one in plan.items if one.index not in own & taken]))
        taken |= own
    return made


@dataclass(frozen=True)
class Written:
    """Where an item was written; every rank tells the coordinator."""

    file: FileRow
    offset: int
    sizes: tuple[int, ...]
    item: tuple[int, int]


class Writer:
    """Writes this rank's items into its file of a draft; the coordinator publishes them all, with `values`.

    Items are asked for one by one in the order of the plan, and each is written before the next is asked for.
    """

    def __init__(
        self, draft: Draft, values: dict[str, Any], told: Told = untold, places: Mapping[str, Within] | None = None
    ) -> None:
        self.draft, self.values, self._told = draft, values, told
        self._places = places or {}  # of items that are parts of others

    def __call__(self, items: dict[str, Any], planner: AnyPlanner, ranks: Ranks) -> None:
        """Writes what the ranks have, and publishes it once it lasts; every rank calls this."""
        found: list[Metadata] = []

        def plan() -> SavePlan:
            planner.set_up_planner(items, is_coordinator=ranks.rank == 0)
            return planner.create_local_plan()

        def divide(plans: list[SavePlan]) -> list[SavePlan]:
            """The first rank's: what each of them writes, with the number that names its file."""
            plans, metadata = planner.create_global_plan(plans)
            found.append(metadata)
            return [replace(one, storage_data=rank) for rank, one in enumerate(plans)]

        mine = ranks.divide("plan", plan, divide)

        ranks.gather(
            "writing",
            lambda: self.write_data(planner.finish_plan(mine), planner),
            lambda results: self._publish(found[0], results),
        )

    def write_data(self, plan: SavePlan, planner: AnyPlanner) -> list[WriteResult]:
        """Returns when all of it lasts on the disk. A rank that has nothing to write makes no file."""
        if not plan.items:
            return []
        placed: list[tuple[WriteItem, int, tuple[int, int]]] = []
        expected = sum(_nbytes(item) + AROUND for item in plan.items)
        expected += 4 * (expected // BLOCK + 1)
        with FileWriter(self.draft.file(plan.storage_data), expected=expected) as writer:
            item = plan.items[0]
            try:
                for item in plan.items:
                    placed.append((item, *self._write(writer, item, planner)))
                file = writer.finish()
            except IoError as error:
                if error.path != str(writer.path):  # state that could not be read from its own disk
                    raise
                key = _key_at(placed, error.offset, item)
                raise again(f"{error}. {key!r} was being saved there; nothing is published", error) from error
        return [
            WriteResult(item.index, whole[1], Written(file, offset, _sizes(item), whole))
            for item, offset, whole in placed
        ]

    def _write(self, writer: FileWriter, item: WriteItem, planner: AnyPlanner) -> tuple[int, tuple[int, int]]:
        """Where the bytes begin; where the zip around them begins, and its length."""
        tensor = _resolved(item, planner)
        before, after = envelope(tensor.dtype, tensor.shape)
        writer.align(ALIGN)
        begin = writer.append(before)
        offset = writer.nbytes
        for piece in pieces(tensor, BLOCK):
            for part in piece.split(STEP):
                writer.append(part)
                self._told(part.numel())
        writer.append(after)
        return offset, (begin, writer.nbytes - begin)

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all have written: the index, and torch's own beside it."""
        index = Index(self.draft.save_id, len(results), [], {}, self.values, _versions())
        saved = {
            key: one for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)
        }
        whole = folded(saved, self._places)  # _resolved refuses all else
        metadata.state_dict_metadata = dict(whole)
        for key, found in whole.items():
            index.tensors[key] = TensorRow(dtype_name(found.properties.dtype), tuple(found.size))
        storage = {}
        for of_rank in results:
            for result in of_rank:
                placed: Written = result.storage_data
                if not index.files or index.files[-1] != placed.file:
                    index.files.append(placed.file)
                where = index_of(result.index, self._places)
                offsets = tuple(where.offset or (0,) * len(placed.sizes))
                box = Box(len(index.files) - 1, placed.offset, offsets, placed.sizes, placed.item)
                index.tensors[where.fqn].boxes.append(box)
                storage[where] = _StorageInfo(placed.file.name, *placed.item)
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.draft.folder), save_id=self.draft.save_id)
        self.draft.publish(index, pickle.dumps(metadata))


def _resolved(item: WriteItem, planner: AnyPlanner) -> Tensor:
    key = item.index.fqn
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{key} is no tensor, and data files hold tensors alone: other values go into `extra`")
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(
            f"{key} is a {kind} tensor; dense ones can be saved: convert it with to_dense() or dequantize()"
        )
    planned = item.tensor_data
    if tensor.shape != planned.chunk.sizes or tensor.dtype is not planned.properties.dtype:
        raise StateError(
            f"{key} was described as {dtype_name(planned.properties.dtype)} of {tuple(planned.chunk.sizes)} and is now "
            f"{dtype_name(tensor.dtype)} of {tuple(tensor.shape)}: it was exchanged while it was being saved"
        )
    return tensor


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes)


def _nbytes(item: WriteItem) -> int:
    found = item.tensor_data
    return prod(found.chunk.sizes) * found.properties.dtype.itemsize if found is not None else 0


def _key_at(placed: list[tuple[WriteItem, int, tuple[int, int]]], offset: int, item: WriteItem) -> str:
    for other, _, (begin, length) in placed:
        if begin <= offset < begin + length:
            return other.index.fqn
    return item.index.fqn


def _versions() -> dict[str, str]:
    try:
        ours = version("zerokern")
    except PackageNotFoundError:  # a source tree on the path
        ours = "0+source"
    return {"zerokern": ours, "torch": torch.__version__, "python": platform.python_version()}
