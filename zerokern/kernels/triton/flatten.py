"""Tensors into a bucket and back: all contiguous ones of one dtype in one launch, with cast, scale and sum of squares.

Reads one side once, writes the other once. Views that are not contiguous: `strided`. Reference: `flat.flatten` with
impl="reference"; the order of the sum: `reference_device.moved_sumsq`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton.rows import (
    TILE_ROWS,
    finish_stats,
    move_tile,
)

__all__ = ["move_rows"]


@triton.jit(
    do_not_specialize=["first", "scale", "follows"],
    do_not_specialize_on_alignment=["bucket", "stats", "offsets", "numels", "factor"],
)
def move_rows(
    bucket, stats, partials, counter, tiles, distances, first: tl.int64, offsets, numels, scale, factor, follows,
    TYPE: tl.constexpr, IN: tl.constexpr, VEC: tl.constexpr, WIDTH: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Program i moves tile `tiles[i]` = (row, tile within the row) ; IN: of the tensors at `first` + their `distances`
    to their offsets in the bucket, else from there to them."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(tiles + 2 * program).to(tl.int64)
    base = tl.load(tiles + 2 * program + 1).to(tl.int64) * (TILE_ROWS * WIDTH)
    tensor = (first + tl.load(distances + row)).to(tl.pointer_type(TYPE))
    span = bucket + tl.load(offsets + row)
    left = tl.minimum(tl.load(numels + row) - base, TILE_ROWS * WIDTH).to(tl.int32)
    if factor is not None:
        scale = scale * tl.load(factor)
    if IN:
        total = move_tile(tensor, span, base, left, scale, VEC, WIDTH, STATS)
    else:
        total = move_tile(span, tensor, base, left, scale, VEC, WIDTH, STATS)
    if STATS:
        finish_stats(stats, partials, counter, total, follows)
