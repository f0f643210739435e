"""A flat span of a tensor as boxes: what checkpoints, which speak of boxes, know of what a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["Cuboid", "boxes", "runs"]

Cuboid = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, its first element's place within the span


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Cuboid]:
    """The fewest boxes of a tensor of `shape` that its elements [start, start + numel) make up, in their order.

    >>> boxes((3, 4), 2, 8)
    [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 2), 6)]
    >>> boxes((3, 4), 4, 8), boxes((), 0, 1), boxes((3, 4), 5, 0)
    ([((1, 0), (2, 4), 0)], [((), (), 0)], [])
    """
    if not numel:
        return []
    return list(_cut((), tuple(shape), start, start + numel, start)) if shape else [((), (), 0)]


def _cut(fixed: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int, first: int) -> Iterator[Cuboid]:
    """Of the part of a tensor with these leading indices, elements [begin, end); `first` is where the span begins."""
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


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The other way: a box's elements, in its own order, as (start in the tensor, numel, first within the box).

    >>> runs((3, 4), (1, 0), (2, 4)), runs((3, 4), (0, 2), (2, 2))
    ([(4, 8, 0)], [(2, 2, 0), (6, 2, 2)])
    """
    if not math.prod(sizes):
        return []
    whole = len(shape)  # the dimensions from here on are consecutive elements of the tensor
    while whole and (whole == len(shape) or sizes[whole] == shape[whole]):
        whole -= 1
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    numel = math.prod(sizes[whole:])
    begins = [sum(offset * step for offset, step in zip(offsets, steps, strict=True))]
    for dim in range(whole):
        begins = [begin + index * steps[dim] for begin in begins for index in range(sizes[dim])]
    return [(begin, numel, place * numel) for place, begin in enumerate(begins)]
