"""What is read from a checkpoint on its way: parts of its boxes, and the memory that they go into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from zerokern.core.errors import StateError
from zerokern.memory.here import Cuboid, boxes
from zerokern.saving.index import Box, TensorRow
from zerokern.saving.reading import Span
from zerokern.saving.staging import BLOCK, copy

__all__ = ["Landing", "Parts", "landings"]

ROW = 8 * BLOCK  # bytes: what lies between two rows that are shorter is read as well


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

    def spans(self, told: Callable[[int], object]) -> Iterator[Span]:
        """What to read of the box's file, and who takes it."""
        width = self.target.itemsize
        for first, numel in runs(self.box.sizes, self.offsets, self.target.shape, ROW // width):
            yield self.box.offset + first * width, numel * width, self._taking(first, told)

    def _taking(self, first: int, told: Callable[[int], object]) -> Callable[[Tensor, int], None]:
        def take(found: Tensor, at: int) -> None:
            begin = first + at // self.target.itemsize
            place(found.view(self.target.dtype), begin, self.box.sizes, self.offsets, self.target)
            told(found.numel())

        return take

    def cut(self, found: Tensor) -> Tensor:
        """The part, from the whole box."""
        return _narrowed(found, self.offsets, self.target.shape)


def landings(items: Mapping[str, Any], tensors: Mapping[str, TensorRow]) -> list[Landing]:
    """Where what is to be read comes from, and where it goes: `items` are tensors, whole or divided, or `Parts`.

    >>> row = TensorRow("float32", (4,), [Box(0, 0, (0,), (3,), (0, 12)), Box(0, 12, (3,), (1,), (12, 4))])
    >>> [(one.box.offsets, one.offsets, len(one.target)) for one in landings({"w": torch.zeros(4)}, {"w": row})]
    [((0,), (0,), 3), ((3,), (0,), 1)]
    """
    return [one for key, item in items.items() for one in _landings(key, item, tensors[key])]


def _landings(key: str, item: Any, row: TensorRow) -> Iterator[Landing]:
    if tuple(item.shape) != row.shape:
        raise StateError(f"{key} was saved with the shape {row.shape} and is to be read into {tuple(item.shape)}")
    dtype = getattr(torch, row.dtype)
    for offsets, target in _boxes_of(key, item):
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


def _boxes_of(key: str, item: Any) -> Iterator[tuple[Sequence[int], Tensor]]:
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
