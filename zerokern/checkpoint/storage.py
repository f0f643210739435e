"""Writes a checkpoint by torch.distributed.checkpoint's plan: which rank writes which box, and into which file."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
from torch.distributed.checkpoint.utils import find_state_dict_object

from zerokern.checkpoint.files import BLOCK, FileWriter
from zerokern.checkpoint.folder import Draft
from zerokern.checkpoint.index import Box, Cuboid, FileRow, Index, TensorRow
from zerokern.checkpoint.layout import PartOf, index_of, merge_parts
from zerokern.checkpoint.ranks import Ranks
from zerokern.checkpoint.source import Report, dtype_name, no_report
from zerokern.checkpoint.torch_zip import ALIGN, zip_around
from zerokern.core.errors import IoError, StateError
from zerokern.io.ticket import again
from zerokern.memory.here import Here, write_items
from zerokern.memory.stream import Record
from zerokern.optim.disk import RecordReader
from zerokern.optim.records import OnDisk, RecordSpan

__all__ = ["Column", "SavePlanner", "write_checkpoint", "write_data"]

STATE = "optim.state."
AROUND = 1024  # the most bytes that a zip adds to a tensor, with padding


class Column:
    """One tensor of a parameter's state on disk. It is read place by place while it is saved, never as a whole."""

    def __init__(self, here: Here, reader: RecordReader, owner: OnDisk, key: str) -> None:
        self.reader, self._owner, self._here, self._key = reader, owner, here, key
        self._number, slot = next((i, slot) for i, slot in enumerate(owner.slots) if slot.key == key)
        self.dtype, self.shape = slot.dtype, here.of(key).shape
        self.places = [place for place in owner.places if slot in place.slots]

    @cached_property
    def _boxes(self) -> dict[tuple[int, ...], tuple[RecordSpan, int, tuple[int, ...]]]:
        """By where each begins: its place, its first element there, and its sizes. Only a save asks for them."""
        return {
            at: (place, first, sizes)
            for place in self.places
            for at, sizes, first in self._here.within(place.start, place.numel).of(self._key).boxes()
        }

    def size(self) -> torch.Size:
        return self.shape

    def read(self, place: RecordSpan) -> Tensor:
        """Returns its part in a place, 1-D: a view of the ring, valid until later records are read."""
        return self._owner.cells(place, self.reader.cell(place.record))[self._key]

    def order(self, place: RecordSpan) -> tuple[int, int, int]:
        """Returns a sort key: parts in this order are read with one read per record."""
        return self.reader.number(place.record), place.offset, self._number

    def box(self, index: MetadataIndex) -> tuple[RecordSpan, int, tuple[int, ...]]:
        """Returns the place that holds a box, the box's first element there, and its sizes."""
        return self._boxes[tuple(index.offset or ())]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        cuboids = [(at, sizes, first) for at, (_, first, sizes) in self._boxes.items()]
        return write_items(fqn, self.shape, self.dtype, cuboids)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Returns a view of a box in the ring buffer; it is valid until a few more boxes have been read."""
        place, first, sizes = self.box(index)
        return self.read(place)[first : first + prod(sizes)].view(sizes)


class SavePlanner(DefaultSavePlanner):
    """torch's planner for a flat dict of items. Items on disk come first, in the order of their records.

    Of what several ranks hold, one writes it. Parameters are distributed among them; all other model tensors are
    written by the first rank, because buffers that ranks update separately must not be mixed.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(_leave_out_replicas(_assign_unstepped(all_plans)))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Sorts the items of this rank into the order in which they are written."""
        plan = super().finish_plan(new_plan)
        far: list[tuple[Column, RecordSpan, int, WriteItem]] = []
        near: list[WriteItem] = []
        asked: dict[RecordReader, list[Record]] = {}
        for item in plan.items:
            column = self.state_dict[item.index.fqn]
            if not isinstance(column, Column):
                near.append(item)
                continue
            place, first, _ = column.box(item.index)
            asked.setdefault(column.reader, []).append(place.record)
            far.append((column, place, first, item))
        for reader, records in asked.items():  # replicated state is written by one of those who have it
            reader.expect(records)
        turns = {reader: turn for turn, reader in enumerate(asked)}
        far.sort(key=lambda part: (turns[part[0].reader], *part[0].order(part[1]), part[2]))
        self.plan = replace(plan, items=[item for *_, item in far] + near)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the tensor of an item."""
        item = self.state_dict[index.fqn]
        if isinstance(item, Column):
            return item.__get_tensor_shard__(index)
        return find_state_dict_object(self.state_dict, index).detach()


def _assign_unstepped(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Assigns model tensors that no optimizer steps (such as buffers) to the first rank that has them."""
    names = {item.index.fqn for plan in plans for item in plan.items}
    stepped = {f"model.{key.removeprefix(STATE).rpartition('.')[0]}" for key in names if key.startswith(STATE)}
    alone = {name for name in names if name.startswith("model.")} - stepped
    taken: set[MetadataIndex] = set()
    made = []
    for plan in plans:
        own = {item.index for item in plan.items if item.type is WriteItemType.TENSOR and item.index.fqn in alone}
        made.append(replace(plan, items=[item for item in plan.items if item.index not in own & taken]))
        taken |= own
    return made


def _leave_out_replicas(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leaves out what a rank has in other boxes than one before it: budgets of ranks may differ, and their records.

    Of what several ranks have in the same boxes, torch's planner leaves one. Parts of ranks are the same or disjoint.
    """
    found: dict[str, dict[int, set[Cuboid]]] = {}
    numels: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if (data := item.tensor_data) is not None:
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                found.setdefault(item.index.fqn, {}).setdefault(rank, set()).add(box)
                numels[item.index.fqn] = data.size.numel()
    left_out: set[tuple[int, str]] = set()
    for key, of_ranks in found.items():
        if sum(prod(sizes) for _, sizes in set().union(*of_ranks.values())) <= numels[key]:
            continue
        kept: list[set[Cuboid]] = []
        for rank, boxes in of_ranks.items():
            first, _ = min(boxes)
            before = [one for one in kept if any(_holds(box, first) for box in one)]
            if before and before[0] != boxes:
                left_out.add((rank, key))
            elif not before:
                kept.append(boxes)
    return [
        replace(plan, items=[item for item in plan.items if (rank, item.index.fqn) not in left_out])
        for rank, plan in enumerate(plans)
    ]


def _holds(box: Cuboid, place: tuple[int, ...]) -> bool:
    return all(at <= here < at + size for at, size, here in zip(*box, place, strict=True))


_Data = tuple[FileRow, list[tuple[MetadataIndex, Box]]] | None
"""The data file of a rank, and the boxes in it, which do not have its number yet."""


def write_checkpoint(
    draft: Draft,
    items: dict[str, Any],
    values: dict[str, Any],
    planner: AnyPlanner,
    ranks: Ranks,
    report: Report = no_report,
    within: Mapping[str, PartOf] | None = None,
) -> None:
    """Writes each rank's items into its data file; the first rank publishes the files of all ranks, with `values`.

    Every rank calls this. Each item is requested and written before the next one, in the order of the plan. `within`:
    the places of items that are parts of larger tensors.
    """
    described: list[Metadata] = []

    def plan() -> SavePlan:
        planner.set_up_planner(items, is_coordinator=ranks.rank == 0)
        return planner.create_local_plan()

    def scatter(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        described.append(metadata)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]  # it names the rank's file

    mine = ranks.scatter("plan", plan, scatter)
    ranks.gather_to_first(
        "writing",
        lambda: write_data(draft, planner.finish_plan(mine), planner, report),
        lambda files: _publish(draft, described[0], files, values, within or {}),
    )


def write_data(draft: Draft, plan: SavePlan, planner: AnyPlanner, report: Report) -> _Data:
    """Writes the items of the plan and syncs the file. A rank without items makes no file."""
    if not plan.items:
        return None
    placed: list[tuple[MetadataIndex, Box]] = []
    expected = sum(_nbytes(item) + AROUND for item in plan.items)
    expected += 4 * (expected // BLOCK + 1)
    with FileWriter(draft.file(plan.storage_data), expected=expected) as writer:
        item = plan.items[0]
        try:
            for item in plan.items:
                tensor = _resolve_tensor(item, planner)
                before, after = zip_around(tensor.dtype, tensor.shape)
                writer.align(ALIGN)
                begin = writer.append(before)
                offset = writer.append(tensor, report)
                writer.append(after)
                box = Box(0, offset, (), tuple(tensor.shape), (begin, writer.nbytes - begin))
                placed.append((item.index, box))
            return writer.finish(), placed
        except IoError as error:
            if error.path != str(writer.path):  # state that could not be read from its own disk
                raise
            there = (index for index, box in placed if box.item[0] <= error.offset < sum(box.item))
            key = next(there, item.index).fqn
            raise again(f"{error}. {key!r} was being saved there; nothing is published", error) from error


def _publish(
    draft: Draft, metadata: Metadata, files: Sequence[_Data], values: dict[str, Any], within: Mapping[str, PartOf]
) -> None:
    """Publishes our index and torch's, on the first rank, once all ranks have written."""
    index = Index(draft.save_id, len(files), [], {}, values, _versions())
    saved = {key: row for key, row in metadata.state_dict_metadata.items() if isinstance(row, TensorStorageMetadata)}
    whole = merge_parts(saved, within)  # `_resolve_tensor` refuses all else
    metadata.state_dict_metadata = dict(whole)
    for key, tensor in whole.items():
        index.tensors[key] = TensorRow(dtype_name(tensor.properties.dtype), tuple(tensor.size))
    metadata.storage_data = {}
    for number, (file, placed) in enumerate(filter(None, files)):
        index.files.append(file)
        for of_item, box in placed:
            where = index_of(of_item, within)
            offsets = tuple(where.offset or (0,) * len(box.sizes))
            index.tensors[where.fqn].boxes.append(replace(box, file=number, offsets=offsets))
            metadata.storage_data[where] = _StorageInfo(file.name, *box.item)
    metadata.storage_meta = StorageMeta(checkpoint_id=str(draft.folder), save_id=draft.save_id)
    draft.publish(index, pickle.dumps(metadata))


def _resolve_tensor(item: WriteItem, planner: AnyPlanner) -> Tensor:
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


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def _versions() -> dict[str, str]:
    try:
        ours = version("zerokern")
    except PackageNotFoundError:  # a source tree on the path
        ours = "0+source"
    return {"zerokern": ours, "torch": torch.__version__, "python": platform.python_version()}
