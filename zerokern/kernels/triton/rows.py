"""Tiles of contiguous rows moved with cast, scale and sum of squares in one pass, and sums in an order that is written
down: the same bits on every GPU, in every run and in the interpreter.

Every byte moves once: the itemsize of the source and that of the target per element. A tile whose source and target
are both aligned moves 128 bits at a time; any other one element at a time, in accesses that are contiguous across a
warp, so that it costs instructions but no bytes.

A sum over an axis of two elements has no order, so every level of a tree is one. What `tl.sum` makes of a longer axis
depends on the layout that the compiler chose. The order in terms of torch: `zerokern.kernels.reference_device`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton.codecs import rounded, widened
from zerokern.kernels.triton.wide import add_squares

__all__ = [
    "LAST_ROWS",
    "NUM_WARPS",
    "ROWS",
    "SOME_ROWS",
    "TILE_ROWS",
    "finish_stats",
    "is_last_program",
    "move_tile",
    "row_width",
    "sum_columns",
    "sum_halves",
    "sum_pairs",
]

NUM_WARPS = 4
TILE_ROWS = tl.constexpr(16)  # of `row_width` elements each
ROWS = tl.constexpr(8)  # of these in flight at once
SOME_ROWS = tl.constexpr(2)  # where each element is an access of its own
COLUMNS = tl.constexpr(1024)
LAST_ROWS = tl.constexpr(1)  # of what is left, under a mask


def row_width(itemsize: int) -> int:
    """Elements of a row of a tile: 16 bytes of the wider dtype for each thread."""
    return 32 * NUM_WARPS * 16 // itemsize


@triton.jit
def sum_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Each row of x [ROWS, WIDTH] to one element: x[j] + x[j + WIDTH / 2], and so on with the halves."""
    if WIDTH > 1:
        x = sum_halves(tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), axis=1), ROWS, WIDTH // 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def sum_pairs(x, WIDTH: tl.constexpr):
    """x [WIDTH] to a scalar: x[2 j] + x[2 j + 1], and so on with the pairs."""
    if WIDTH > 1:
        x = sum_pairs(tl.sum(tl.reshape(x, (WIDTH // 2, 2)), axis=1), WIDTH // 2)
    else:
        x = tl.sum(x, axis=0)
    return x


@triton.jit
def sum_columns(partials, count):
    """Column j of 1024 adds the partial sums j, j + 1024, ... in order; then the columns by halves."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, count, COLUMNS):
        # past the L1 cache, which knows nothing of what other programs wrote
        total += tl.load(partials + start + column, mask=start + column < count, other=0.0, cache_modifier=".cg")
    return tl.sum(sum_halves(tl.reshape(total, (1, COLUMNS)), 1, COLUMNS), axis=0)


@triton.jit
def is_last_program(counter):
    """Whether all other programs of the launch are past this line, their stores visible. Resets the counter if so."""
    tl.debug_barrier()  # the stores of all threads, before the one thread that counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _whole_rows(
    sums, source, target, base, scale,
    COUNT: tl.constexpr, VEC: tl.constexpr, WIDTH: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COUNT)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    source = tl.multiple_of(source + base, VEC * source.dtype.element_ty.primitive_bitwidth // 8)
    target = tl.multiple_of(target + base, VEC * target.dtype.element_ty.primitive_bitwidth // 8)
    y = rounded(widened(tl.load(source + at)) * scale, target.dtype.element_ty)
    tl.store(target + at, y)
    return add_squares(sums, y, COUNT) if STATS else sums


@triton.jit
def _other_rows(sums, source, target, base, left, scale, WIDTH: tl.constexpr, STATS: tl.constexpr):
    at = tl.arange(0, LAST_ROWS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    mask = at < left
    x = widened(tl.load(source + base + at, mask=mask, other=0.0))
    y = rounded(x * scale, target.dtype.element_ty)
    tl.store(target + base + at, y, mask=mask)
    return add_squares(sums, tl.where(mask, y, 0.0), LAST_ROWS) if STATS else sums


@triton.jit
def move_tile(source, target, base, left, scale, VEC: tl.constexpr, WIDTH: tl.constexpr, STATS: tl.constexpr):
    """target[i] = cast(scale * source[i]) for i from `base` on, `left` and at most TILE_ROWS * WIDTH of them.

    Returns the sum of squares of what was written, 0 without STATS: position j of WIDTH adds its squares of each row in
    order, then pairs are added.
    """
    ragged = (source.to(tl.int64) % (VEC * source.dtype.element_ty.primitive_bitwidth // 8)) | (
        target.to(tl.int64) % (VEC * target.dtype.element_ty.primitive_bitwidth // 8)
    )
    blocks = left // (SOME_ROWS * WIDTH)
    wide = tl.where(ragged == 0, left // (ROWS * WIDTH), 0)
    sums = tl.zeros((1, WIDTH), tl.float64)
    for block in range(wide):
        sums = _whole_rows(sums, source, target, base + block * (ROWS * WIDTH), scale, ROWS, VEC, WIDTH, STATS)
    source += base
    target += base
    for block in range(wide * (ROWS // SOME_ROWS), blocks):
        sums = _whole_rows(sums, source, target, block * (SOME_ROWS * WIDTH), scale, SOME_ROWS, 1, WIDTH, STATS)
    whole = blocks * (SOME_ROWS * WIDTH)
    for start in range(whole, left, LAST_ROWS * WIDTH):
        sums = _other_rows(sums, source, target, start, left - start, scale, WIDTH, STATS)
    return sum_pairs(tl.reshape(sums, (WIDTH,)), WIDTH) if STATS else 0.0


@triton.jit
def finish_stats(stats, partials, counter, total, follows):
    """Program i hands in its sum; the last one to do so writes [sum of all, 1.0 if it is not finite else 0.0].

    `follows`: the launch continues one that wrote `stats` before it.
    """
    tl.store(partials + tl.program_id(0), total)
    if is_last_program(counter):
        total = sum_columns(partials, tl.num_programs(0))
        if follows != 0:
            total += tl.load(stats)
        tl.store(stats, total)
        tl.store(stats + 1, tl.where(tl.abs(total) < float("inf"), 0.0, 1.0).to(tl.float64))
