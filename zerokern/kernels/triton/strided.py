"""Strided tensors into a bucket and back: a list of any views in one launch, with cast, scale and sum of squares.

A tile is 32 x 32 elements of two dimensions: the last one, along which the bucket is contiguous, and the one along
which the tensor comes closest to that. Where these differ the tile turns in shared memory, so that both sides are
accessed along their own lines. All other dimensions are in the number of the tile, divided out once per program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import triton
import triton.language as tl

from zerokern.kernels.triton.codecs import rounded, widened
from zerokern.kernels.triton.rows import finish_stats, sum_halves
from zerokern.kernels.triton.wide import squared

__all__ = ["ROW_WORDS", "StridedRow", "merged", "move_strided", "strided_rows"]

SIDE = tl.constexpr(32)
OUTER = tl.constexpr(3)  # dimensions of a row besides the two of its tiles
ROW_WORDS = tl.constexpr(20)

Dims = list[tuple[int, int]]  # (size, stride in elements), outermost first


class StridedRow(NamedTuple):
    """One row of the table: `words` as the kernel reads them, and the number of its tiles."""

    words: tuple[int, ...]
    ntiles: int


def merged(shape: Sequence[int], strides: Sequence[int]) -> Dims:
    """The fewest dimensions that run over the same elements in the same order.

    >>> merged((2, 3, 4, 1), (12, 4, 1, 9)), merged((4, 3), (1, 4)), merged((), ())
    ([(24, 1)], [(4, 1), (3, 4)], [])
    """
    dims: Dims = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


def strided_rows(tensor: int, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Iterator[StridedRow]:
    """The rows of a tensor, number `tensor` of the list, that lies at `offset` of the bucket.

    >>> [row.ntiles for row in strided_rows(0, 0, (100, 65), (1, 100))]
    [12]
    """
    dims = merged(shape, strides)
    if not dims:
        return
    inside = 1
    dense: list[tuple[int, int, int]] = []  # (size, stride in the tensor, stride in the bucket), innermost first
    for size, stride in reversed(dims):
        dense.append((size, stride, inside))
        inside *= size
    if len(dense) == 1:
        size, stride, _ = dense.pop()
        across = (-(-size // SIDE.value), SIDE.value * stride, SIDE.value)
        along, limit = (SIDE.value, stride, 1), size
    else:
        along = dense.pop(0)
        nearest = min(dense, key=lambda dim: dim[1] or inside)
        across = nearest if 0 < nearest[1] < along[1] else dense[0]
        dense.remove(across)
        limit = (across[0] - 1) * across[2] + along[0]
    turned = 0 < across[1] < along[1]
    outer, peeled = dense[: OUTER.value], dense[OUTER.value :]
    ntiles = -(-across[0] // SIDE.value) * -(-along[0] // SIDE.value)
    for size, _, _ in outer:
        ntiles *= size
    outer += [(1, 0, 0)] * (OUTER.value - len(outer))
    tail = (*across, along[0], along[1], limit, int(turned), *(number for dim in outer for number in dim))
    for place in product(*(range(size) for size, _, _ in peeled)):
        begin = sum(i * dim[1] for i, dim in zip(place, peeled, strict=True))
        target = offset + sum(i * dim[2] for i, dim in zip(place, peeled, strict=True))
        words = (tensor, begin, target, *tail)
        yield StridedRow(words + (0,) * (ROW_WORDS.value - len(words)), ntiles)


@triton.jit
def _outer(words, number):
    """Of the outer dimensions of tile `number`: (offset in the tensor, offset in the bucket)."""
    begin = tl.load(words + 1)
    target = tl.load(words + 2)
    for dim in tl.static_range(OUTER):
        size = tl.load(words + 10 + 3 * dim)
        i = number % size
        number = number // size
        begin += i * tl.load(words + 11 + 3 * dim)
        target += i * tl.load(words + 12 + 3 * dim)
    return begin, target


@triton.jit
def _move(tensor, stride_a, stride_b, bucket, dense, a, b, sizes, scale, IN: tl.constexpr, TURNED: tl.constexpr):
    """A tile [a, b]; IN: from the tensor into the bucket. Returns what was written, [a, b]."""
    size_a, size_b, limit = sizes
    in_bucket = a[:, None] * dense + b[None, :]
    mask = (a[:, None] < size_a) & (b[None, :] < size_b) & (in_bucket < limit)
    if TURNED:
        in_tensor = b[:, None] * stride_b + a[None, :] * stride_a
        there = (b[:, None] < size_b) & (a[None, :] < size_a)
    else:
        in_tensor = a[:, None] * stride_a + b[None, :] * stride_b
        there = mask
    if IN:
        x = tl.load(tensor + in_tensor, mask=there, other=0.0)
        x = tl.trans(x) if TURNED else x
        y = rounded(widened(x) * scale, bucket.dtype.element_ty)
        tl.store(bucket + in_bucket, y, mask=mask)
    else:
        x = tl.load(bucket + in_bucket, mask=mask, other=0.0)
        y = rounded(widened(x) * scale, tensor.dtype.element_ty)
        tl.store(tensor + in_tensor, tl.trans(y) if TURNED else y, mask=there)
    return tl.where(mask, y, 0.0)


@triton.jit
def _sum(y):
    return tl.sum(sum_halves(tl.reshape(squared(y), (1, SIDE * SIDE)), 1, SIDE * SIDE), axis=0)


@triton.jit(
    do_not_specialize=["first", "scale", "follows"],
    do_not_specialize_on_alignment=["bucket", "stats", "factor"],
)
def move_strided(
    bucket, stats, partials, counter, tiles, distances, first: tl.int64, rows, scale, factor, follows,
    TYPE: tl.constexpr, IN: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Program i moves tile `tiles[i]` = (row, tile within the row), IN to the bucket or out of it.

    The sum of squares of a tile: its halves are added, element by element, and so on.
    """
    program = tl.program_id(0).to(tl.int64)
    words = rows + tl.load(tiles + 2 * program).to(tl.int64) * ROW_WORDS
    number = tl.load(tiles + 2 * program + 1).to(tl.int64)
    size_a = tl.load(words + 3)
    size_b = tl.load(words + 6)
    tiles_b = tl.cdiv(size_b, SIDE)
    tiles_a = tl.cdiv(size_a, SIDE)
    b = (number % tiles_b) * SIDE + tl.arange(0, SIDE)
    number = number // tiles_b
    a = (number % tiles_a) * SIDE + tl.arange(0, SIDE)
    begin, target = _outer(words, number // tiles_a)
    tensor = (first + tl.load(distances + tl.load(words))).to(tl.pointer_type(TYPE)) + begin
    sizes = (size_a, size_b, tl.load(words + 8))
    stride_a, dense, stride_b = tl.load(words + 4), tl.load(words + 5), tl.load(words + 7)
    if factor is not None:
        scale = scale * tl.load(factor)
    total = tl.full((), 0.0, tl.float64)
    if tl.load(words + 9) != 0:
        y = _move(tensor, stride_a, stride_b, bucket + target, dense, a, b, sizes, scale, IN, True)
        if STATS:
            total = _sum(y)
    else:
        y = _move(tensor, stride_a, stride_b, bucket + target, dense, a, b, sizes, scale, IN, False)
        if STATS:
            total = _sum(y)
    if STATS:
        finish_stats(stats, partials, counter, total, follows)
