"""A bucket out into tensors: every contiguous tensor of one dtype in one launch, with cast, scale and sum of squares.

Reads the bucket once, writes the tensors once. Views that are not contiguous: `strided`. Reference: `flat.unflatten`
with impl="reference"; the order of the sum: `reference_device.moved_sumsq`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from zerokern.kernels.triton.rows import TILE_ROWS, finish_stats, move_tile, row_jobs

__all__ = ["aot_jobs", "unflatten_rows"]


@triton.jit(
    do_not_specialize=["scale", "follows"],
    do_not_specialize_on_alignment=["bucket", "stats", "offsets", "numels", "factor"],
)
def unflatten_rows(
    bucket, stats, partials, counter, tiles, pointers, offsets, numels, scale, factor, follows,
    TYPE: tl.constexpr, VEC: tl.constexpr, WIDTH: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Program i moves tile `tiles[i]` = (row, tile within the row) of the spans at the offsets to `pointers`."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(tiles + 2 * program).to(tl.int64)
    base = tl.load(tiles + 2 * program + 1).to(tl.int64) * (TILE_ROWS * WIDTH)
    source = bucket + tl.load(offsets + row)
    target = tl.load(pointers + row).to(tl.pointer_type(TYPE))
    left = tl.minimum(tl.load(numels + row) - base, TILE_ROWS * WIDTH).to(tl.int32)
    if factor is not None:
        scale = scale * tl.load(factor)
    total = move_tile(source, target, base, left, scale, VEC, WIDTH, STATS)
    if STATS:
        finish_stats(stats, partials, counter, total, follows)


def aot_jobs(every: bool) -> list[dict[str, Any]]:
    """Jobs of `ahead`: from and to each dtype, with and without the sum of squares and a scale on the device."""
    return row_jobs(unflatten_rows, every, into=False)
