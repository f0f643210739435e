"""Which elements of a tensor this rank holds: a span of a box of it; as boxes, as torch.distributed.checkpoint asks for
them, and as runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zerokern.kernels.formats import BLOCK, blocks

__all__ = ["Cuboid", "Here", "boxes", "chunk_list", "runs", "write_items"]

Cuboid = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, its first element's place within the span


@dataclass(frozen=True)
class Here:
    """This rank's elements of a tensor: elements [start, start + numel) of its box at `offsets` with `sizes`,
    flattened.

    Of a plain tensor that is everything. Sharding flat memory leaves a span, sharding dimensions a box, both a span of
    a box. `group`: the ranks that it is sharded over, if known.

    >>> here = Here.span(torch.Size([3, 4]), 2, 6); here.boxes()
    [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2)]
    >>> here.runs(), here.cut(torch.arange(12).view(3, 4))
    ([(2, 6, 0)], tensor([2, 3, 4, 5, 6, 7]))
    """

    shape: torch.Size
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    numel: int
    group: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"elements {self.first}:{self.first + self.numel} of {tuple(self.shape)}"

    @staticmethod
    def span(shape: torch.Size, start: int, numel: int) -> Here:
        """Returns elements [start, start + numel) of the whole flattened tensor."""
        return Here(shape, (0,) * len(shape), tuple(shape), start, numel)

    @property
    def first(self) -> int:
        """The first of these elements, by its number in the whole tensor."""
        if self.sizes == self.shape:
            return self.start
        at, rest = 0, self.start
        for dim in reversed(range(len(self.shape))):
            step = math.prod(self.shape[dim + 1 :])
            rest, inside = divmod(rest, max(self.sizes[dim], 1))
            at += (self.offsets[dim] + inside) * step
        return min(at, self.shape.numel())

    @property
    def misaligned(self) -> str:
        """Why a rank does not begin with a whole int8 block of the tensor; empty where all do."""
        return ""

    def of(self, key: str) -> Here:
        """Returns this rank's elements of a state with this key: the same elements, or the scales of their int8
        blocks."""
        if not key.endswith("_scale"):
            return self
        shape = torch.Size([blocks(self.shape.numel())])
        return replace(
            self, shape=shape, offsets=(0,), sizes=tuple(shape), start=self.first // BLOCK, numel=blocks(self.numel)
        )

    def within(self, begin: int, numel: int) -> Here:
        """Returns [begin, begin + numel) of these elements."""
        return Here(self.shape, self.offsets, self.sizes, self.start + begin, numel)

    def boxes(self) -> list[Cuboid]:
        """Returns the fewest boxes of the tensor that make up these elements, in order."""
        cuboids = boxes(self.sizes, self.start, self.numel)
        return [
            (tuple(a + b for a, b in zip(self.offsets, at, strict=True)), sizes, first) for at, sizes, first in cuboids
        ]

    def runs(self) -> list[tuple[int, int, int]]:
        """Returns these elements as runs: (start in the tensor, numel, first among these elements)."""
        first, end, local_runs = 0, self.start + self.numel, []
        for at, numel in runs(self.shape, self.offsets, self.sizes):
            begin = max(first, self.start)
            count = min(first + numel, end) - begin
            if count > 0:
                local_runs.append((at + begin - first, count, begin - self.start))
            first += numel
        return local_runs

    def alike(self, other: Here) -> bool:
        """Returns whether a tensor that is divided like this one is also divided like `other`."""
        return self.runs() == other.runs()

    def cut(self, whole: Tensor) -> Tensor:
        """Returns these elements of a plain tensor, 1-D; a view of it if possible."""
        box = whole.detach()
        if self.sizes != self.shape:
            box = box[tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))]
        return box.reshape(-1)[self.start : self.start + self.numel]

    def show(self, local: Tensor, before: Any = None, name: str = "") -> Tensor:
        """Returns flat memory of these elements as a tensor of the whole shape; `before`: an
        earlier result to reuse."""
        return local.view(self.shape)


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Cuboid]:
    """Returns the fewest boxes of a tensor of `shape` that make up its elements [start, start + numel), in order.

    >>> boxes((3, 4), 2, 8)
    [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 2), 6)]
    >>> boxes((3, 4), 4, 8), boxes((), 0, 1), boxes((3, 4), 5, 0)
    ([((1, 0), (2, 4), 0)], [((), (), 0)], [])
    """
    if not numel:
        return []
    return list(_cut((), tuple(shape), start, start + numel, start)) if shape else [((), (), 0)]


def _cut(fixed: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int, first: int) -> Iterator[Cuboid]:
    """Yields the boxes of elements [begin, end) of the part with these leading indices; `first` is where the span
    begins."""
    if len(shape) == 1:
        yield (*fixed, begin), (*(1 for _ in fixed), end - begin), begin - first
        return
    row = math.prod(shape[1:])
    top, bottom = -(-begin // row), end // row  # whole rows
    if top > bottom:  # within one row
        yield from _within(fixed, shape, bottom, begin, end, first)
        return
    if begin % row:
        yield from _within(fixed, shape, top - 1, begin, top * row, first)
    if top < bottom:
        rest = shape[1:]
        yield (*fixed, top, *(0 for _ in rest)), (*(1 for _ in fixed), bottom - top, *rest), top * row - first
    if end % row:
        yield from _within(fixed, shape, bottom, bottom * row, end, first)


def _within(
    fixed: tuple[int, ...], shape: tuple[int, ...], number: int, begin: int, end: int, first: int
) -> Iterator[Cuboid]:
    shift = number * math.prod(shape[1:])
    yield from _cut((*fixed, number), shape[1:], begin - shift, end - shift, first - shift)


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yields the elements of a box, in its own order, as runs: (start in the tensor, numel).

    `gap`: rows of so many elements or less are one run with what lies between two of them.

    >>> list(runs((3, 4), (1, 0), (2, 4))), list(runs((3, 4), (0, 2), (2, 2)))
    ([(4, 8)], [(2, 2), (6, 2)])
    >>> list(runs((4, 6), (1, 2), (2, 3), gap=100)), list(runs((4, 6), (1, 2), (2, 3), gap=5))
    ([(8, 9)], [(8, 3), (14, 3)])
    """
    if not math.prod(sizes):
        return
    if not shape:
        yield 0, 1
        return
    inner = math.prod(shape[1:])
    if inner > gap and tuple(sizes[1:]) != tuple(shape[1:]):
        rows = list(runs(shape[1:], offsets[1:], sizes[1:], gap))
        for at in range(offsets[0], offsets[0] + sizes[0]):
            for first, numel in rows:
                yield at * inner + first, numel
        return
    stride, first, last = math.prod(shape), 0, 0
    for length, offset, size in zip(shape, offsets, sizes, strict=True):
        stride //= length
        first += offset * stride
        last += (offset + size - 1) * stride
    yield first, last - first + 1


def write_items(fqn: str, shape: torch.Size, dtype: torch.dtype, cuboids: Sequence[Cuboid]) -> list[Any]:
    """Returns torch's WriteItems for these boxes of a tensor.

    >>> [item.index.offset for item in write_items("w", torch.Size([3, 4]), torch.float32, boxes((3, 4), 2, 6))]
    [torch.Size([0, 2]), torch.Size([1, 0])]
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunk_list(cuboids)
    ]


def chunk_list(cuboids: Sequence[Cuboid]) -> list[Any]:
    """Returns the boxes as torch's ChunkStorageMetadata.

    >>> chunk_list(boxes((3, 4), 4, 8))
    [ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([2, 4]))]
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(sizes)) for at, sizes, _ in cuboids]
