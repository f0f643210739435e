"""What goes through torch.distributed.checkpoint: which part of a tensor is here, and the planners that know of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from zerokern.core.errors import StateError
from zerokern.kernels.formats import BLOCK, blocks
from zerokern.optim.cuts import Cut
from zerokern.zero.boxes import Cuboid, boxes
from zerokern.zero.chunks import chunk_list, write_items
from zerokern.zero.homes import home_of
from zerokern.zero.sharded import Sharded

__all__ = ["LoadPlanner", "OnDiskPart", "Parts", "Region", "SavePlanner"]

STATE = "optim.state."


@dataclasses.dataclass(frozen=True)
class Region:
    """This rank's elements of a tensor: of the box at `offsets` with `sizes`, [start, start + numel).

    `block` is the first of the int8 blocks here, which are counted from the whole tensor's element 0.

    >>> Region.of(torch.zeros(3, 4)).cuboids(2, 6)
    [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2)]
    """

    shape: torch.Size
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    numel: int
    block: int

    @staticmethod
    def of(param: Tensor) -> Region:
        """What is here of a parameter: all of a plain one, this rank's part of a divided one."""
        home = home_of(param)
        if isinstance(param, DTensor):
            cut = Cut(param)
            return Region(param.shape, cut.offsets, tuple(cut.local_shape), 0, cut.numel, cut.start // BLOCK)
        if isinstance(param, Sharded):
            return Region.span(param.shape, param.start, param.local.numel())
        if home is not None and param is home.piece:
            return Region.span(home.shape, home.start, home.numel)
        return Region.span(param.shape, 0, param.numel())

    @staticmethod
    def of_state(param: Tensor) -> Region:
        """What is here of a parameter's state, which is divided from stage 1 on."""
        home = home_of(param)
        return Region.of(param) if home is None else Region.span(home.shape, home.start, home.numel)

    @staticmethod
    def span(shape: torch.Size, start: int, numel: int) -> Region:
        """A flat one."""
        return Region(shape, (0,) * len(shape), tuple(shape), start, numel, start // BLOCK)

    def cuboids(self, begin: int, numel: int, key: str = "") -> list[Cuboid]:
        """The boxes that the elements [begin, begin + numel) of those here are; `begin` is a multiple of 128.

        For a key that ends in `_scale` they are of the scales of their blocks.
        """
        if key.endswith("_scale"):
            return [((self.block + begin // BLOCK,), (blocks(numel),), 0)] if numel else []
        found = boxes(self.sizes, self.start + begin, numel)
        return [
            (tuple(a + b for a, b in zip(self.offsets, at, strict=True)), sizes, first) for at, sizes, first in found
        ]

    def shape_of(self, key: str) -> torch.Size:
        """The whole shape of state of that name."""
        return torch.Size([blocks(self.shape.numel())]) if key.endswith("_scale") else self.shape


class Parts:
    """Boxes of one tensor that are to be read, each into memory that it is given."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self._cuboids: list[Cuboid] = []
        self._views: list[Tensor] = []

    def size(self) -> torch.Size:
        """As a tensor's."""
        return self.shape

    def add(self, cuboids: Sequence[Cuboid], flat: Tensor) -> None:
        """Read these into `flat`, 1-D."""
        for at, sizes, first in cuboids:
            self._cuboids.append((at, sizes, first))
            self._views.append(flat[first : first + math.prod(sizes)].view(sizes))

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self._cuboids)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None  # the same box may go to two places
        return self._views[index.index]


class OnDiskPart:
    """One tensor of state that lies on disk, as something to be saved: read when it is written, never all at once.

    `order` says in which order items are best asked for: that of the records, each of which is read once then.
    """

    def __init__(self, region: Region, key: str, column: Any) -> None:
        self.region, self.key, self.column = region, key, column
        self.shape, self.dtype = region.shape_of(key), column.dtype
        self._places = {
            at: (place, first, sizes)
            for place in column.places
            for at, sizes, first in region.cuboids(place.start, place.numel, key)
        }

    def size(self) -> torch.Size:
        """As a tensor's."""
        return self.shape

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
        return _found(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's, for a flat dict of tensors and `Parts`; nothing is cast, and nothing but tensors is read."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the items as they are: torch would exchange what it does not know."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Every box of every item."""
        assert self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata, True)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refused: bytes would have to be unpickled."""
        raise StateError(f"{read_item.dest_index.fqn}: is not a tensor, and nothing else is read from data files")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where a box of an item goes."""
        return _found(self.state_dict, index)


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


def _found(items: dict[str, Any], index: MetadataIndex) -> Tensor:
    item = items[index.fqn]
    if isinstance(item, (Parts, OnDiskPart)):
        return item.__get_tensor_shard__(index)
    found = find_state_dict_object(items, index)
    assert isinstance(found, Tensor)
    return found.detach()
