"""A checkpoint that can be loaded, whoever wrote it: tensors by our keys, values; which part of it lands where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerokern.checkpoint.index import Box, TensorRow, itemsize, unfit
from zerokern.checkpoint.staging import BLOCK, Span, copy
from zerokern.core.errors import IoError, StateError, ZerokernError
from zerokern.memory.here import Cuboid, boxes

__all__ = ["Foreign", "Landing", "Parts", "Source", "Told", "boxes_of", "dtype_name", "landings", "sound", "untold"]

ROW = 8 * BLOCK  # bytes: what lies between two rows that are shorter is read as well
Told = Callable[[int], object]  # of bytes that have been moved since the last time


def untold(nbytes: int) -> None:
    """For nobody to know."""


@contextmanager
def sound(path: Path, *also: type[Exception]) -> Iterator[None]:
    """For what is done with an index before a load changes anything.

    One with a right checksum, or with none, may hold anything, and what no save writes raises whatever it raises.
    """
    caught: tuple[type[Exception], ...] = (LookupError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
    try:
        yield
    except ZerokernError:
        raise
    except (*caught, *also) as error:
        raise unfit(
            path,
            f"says of its content what no save writes: {type(error).__name__}: {error}. Nothing was changed: "
            "restore it from a copy, or load another checkpoint",
        ) from error


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
    summed = True  # whether all of its bytes have checksums; some writers leave them out

    @abstractmethod
    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        """Fills these, as far as they are here: tensors and `Parts` by our keys. No other rank takes part."""

    @abstractmethod
    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        """All that is wrong with this rank's share of the bytes."""

    @abstractmethod
    def likeness(self) -> str:
        """What two ranks have in common where they have opened the same checkpoint, in words for people."""

    def close(self) -> None:
        """Lets go of its files, where it holds any."""
        return

    @property
    def whole(self) -> Source:
        """As it was opened."""
        return self

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes `damage` reads, on all ranks."""

    def verify(self, rank: int = 0, world: int = 1, told: Told = untold) -> None:
        """Reads this rank's share of the bytes, and raises the first thing that is wrong with them."""
        for error in self.damage(rank, world, told):
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
        self._held_box: tuple[str, tuple[int, ...]] | None = None  # one of many elements is asked for part by part
        self._found: Tensor | None = None
        self._first: dict[str, str] = {}  # the key that `_load` knows, of those that were given names

    @abstractmethod
    def _load(self, key: str, box: Box) -> Tensor:
        """The box of the tensor with this key, on the host."""

    def read(self, items: Mapping[str, Any], told: Told = untold) -> None:
        """Box by box: each is held until the next is read, in this call or another, and parts of it are copied."""
        by_box: dict[tuple[str, tuple[int, ...]], list[Landing]] = {}
        for one in landings(items, self.tensors):
            by_box.setdefault((one.key, one.box.offsets), []).append(one)
        for place, some in sorted(by_box.items(), key=lambda one: one[0] != self._held_box):
            if place != self._held_box:
                self._held_box, self._found = None, None  # before the next is read: two would be twice the memory
                self._found = self.fetch(place[0], some[0].box)
                self._held_box = place
                told(self._found.nbytes)
            assert self._found is not None
            for one in some:
                one.target.copy_(one.cut(self._found))

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

    def damage(self, rank: int = 0, world: int = 1, told: Told = untold) -> Iterator[IoError]:
        boxes = [(key, box) for key, row in self.tensors.items() for box in row.boxes]
        for key, box in boxes[rank::world]:
            try:
                self.fetch(key, box)
            except IoError as error:
                yield error
            told(box.numel * itemsize(self.tensors[key].dtype))

    def _renamed(self, keys: dict[str, str]) -> None:
        super()._renamed(keys)
        self._held_box = self._found = None
        self._first |= {new: key for key, new in keys.items()}
        self.held = {keys.get(key, key): tensor for key, tensor in self.held.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype within torch.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class Parts:
    """Boxes of one tensor that are to be read, each into memory that it is given."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.boxes: list[tuple[tuple[int, ...], Tensor]] = []

    def add(self, cuboids: Sequence[Cuboid], flat: Tensor) -> None:
        """Read these into `flat`, 1-D."""
        self.boxes += [(at, flat[first : first + prod(sizes)].view(sizes)) for at, sizes, first in cuboids]


@dataclass(frozen=True)
class Landing:
    """The part of one box of a source that begins at `offsets` of the box, and the tensor that it goes into."""

    key: str
    box: Box
    offsets: tuple[int, ...]
    target: Tensor

    def spans(self, told: Told) -> Iterator[Span]:
        """What to read of the box's file, and who takes it."""
        width = self.target.itemsize
        for first, numel in runs(self.box.sizes, self.offsets, self.target.shape, ROW // width):
            yield self.box.offset + first * width, numel * width, self._taking(first, told)

    def _taking(self, first: int, told: Told) -> Callable[[Tensor, int], None]:
        def take(found: Tensor, at: int) -> None:
            begin = first + at // self.target.itemsize
            place(found.view(self.target.dtype), begin, self.box.sizes, self.offsets, self.target)
            told(found.numel())

        return take

    def cut(self, found: Tensor) -> Tensor:
        """The part, from the whole box."""
        return _narrowed(found, self.offsets, self.target.shape)


def landings(items: Mapping[str, Any], tensors: Mapping[str, TensorRow]) -> list[Landing]:
    """Where what is to be read comes from, and where it goes: `items` are tensors, whole or divided, or `Parts`."""
    return [one for key, item in items.items() for one in _landings(key, item, tensors[key])]


def _landings(key: str, item: Any, row: TensorRow) -> Iterator[Landing]:
    if tuple(item.shape) != row.shape:
        raise StateError(f"{key} was saved with the shape {row.shape} and is to be read into {tuple(item.shape)}")
    dtype = getattr(torch, row.dtype)
    for offsets, target in boxes_of(key, item):
        if target.dtype is not dtype:
            raise StateError(
                f"{key} was saved as {dtype} and is to be read into {target.dtype}: bytes are read as they are, and "
                "converted by zk.load alone, which knows the formats"
            )
        for box in row.boxes:
            begins = tuple(map(max, offsets, box.offsets))
            ends = tuple(map(min, _ends(offsets, target.shape), _ends(box.offsets, box.sizes)))
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                sizes = _less(ends, begins)
                yield Landing(key, box, _less(begins, box.offsets), _narrowed(target, _less(begins, offsets), sizes))


def boxes_of(key: str, item: Any) -> Iterator[tuple[Sequence[int], Tensor]]:
    """What is here of a tensor; torch asks a DTensor and a Sharded in the same way."""
    if isinstance(item, Parts):
        yield from item.boxes
    elif hasattr(item, "__create_chunk_list__"):
        for chunk in item.__create_chunk_list__():
            yield chunk.offsets, item.__get_tensor_shard__(MetadataIndex(key, chunk.offsets)).detach()
    else:
        yield (0,) * item.dim(), item.detach()


def _ends(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(at + size for at, size in zip(offsets, sizes, strict=True))


def _less(some: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(some, others, strict=True))


def _narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def runs(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], row: int) -> Iterator[tuple[int, int]]:
    """Spans (first, numel) of a flat box `sizes` that hold its part at `offsets` of `lengths`, and little else.

    What lies between two rows of at most `row` elements is read as well: that is cheaper than to stop there.

    >>> list(runs((4, 6), (1, 0), (2, 6), row=100)), list(runs((4, 6), (1, 2), (2, 3), row=100))
    ([(6, 12)], [(8, 9)])
    >>> list(runs((4, 6), (1, 2), (2, 3), row=5))
    [(8, 3), (14, 3)]
    """
    if not prod(lengths):
        return
    if not sizes:
        yield 0, 1
        return
    inner = prod(sizes[1:])
    if inner > row and tuple(lengths[1:]) != tuple(sizes[1:]):
        for at in range(offsets[0], offsets[0] + lengths[0]):
            for first, numel in runs(sizes[1:], offsets[1:], lengths[1:], row):
                yield at * inner + first, numel
        return
    stride, first, last = prod(sizes), 0, 0
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        stride //= size
        first += offset * stride
        last += (offset + length - 1) * stride
    yield first, last - first + 1


def place(piece: Tensor, first: int, sizes: Sequence[int], offsets: Sequence[int], target: Tensor) -> None:
    """Copies elements `first` and following of a flat box `sizes` to their places in `target`, its part at `offsets`.

    The version of `target` may stay: whoever gave it away counts it up, once.

    >>> target = torch.zeros(2, 2, dtype=torch.int64)
    >>> place(torch.arange(3, 9), 3, (4, 3), (1, 1), target)
    >>> target
    tensor([[4, 5],
            [7, 8]])
    """
    if target.is_contiguous() and tuple(target.shape[1:]) == tuple(sizes[1:]):
        begin = first - (offsets[0] * prod(sizes[1:]) if sizes else 0)
        if target.device.type == piece.device.type == "cpu":  # not by torch, whose threads would disturb training
            copy(target.data_ptr() + begin * piece.itemsize, piece.data_ptr(), piece.nbytes)
        else:
            target.view(-1)[begin : begin + piece.numel()].copy_(piece)
        return
    for corner, extent, at in boxes(sizes, first, piece.numel()):
        source = piece[at : at + prod(extent)].view(extent)
        into = target
        for dim, (low, length) in enumerate(zip(corner, extent, strict=True)):
            begin = max(low, offsets[dim])
            numel = min(low + length, offsets[dim] + target.shape[dim]) - begin
            if numel <= 0:
                break
            source = source.narrow(dim, begin - low, numel)
            into = into.narrow(dim, begin - offsets[dim], numel)
        else:
            into.copy_(source)
