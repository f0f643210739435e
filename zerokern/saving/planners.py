"""Parts of tensors that lie on disk, as something to be saved, and the planner of saves that knows of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from zerokern.memory.here import Here
from zerokern.zero.chunks import write_items

__all__ = ["OnDiskPart", "SavePlanner"]

STATE = "optim.state."


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
        return sum(math.prod(sizes) for _, _, sizes in self._places.values()) * self.dtype.itemsize

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        cuboids = [(at, sizes, first) for at, (_, first, sizes) in self._places.items()]
        return write_items(fqn, self.shape, self.dtype, cuboids)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """A view of memory that holds it until a few more have been asked for."""
        place, first, sizes = self._places[tuple(index.offset or ())]
        flat = self.column.read(place)
        return flat[first : first + math.prod(sizes)].view(sizes)

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

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the items as they are."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

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
        self.plan = dataclasses.replace(plan, items=items)
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
        made.append(dataclasses.replace(plan, items=[one for one in plan.items if one.index not in own & taken]))
        taken |= own
    return made
