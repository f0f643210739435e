"""Tensors into a bucket and back: all contiguous ones of one dtype in one launch, with cast, scale and sum of squares.

Reads one side once, writes the other once. Views that are not contiguous: `strided`. Reference: `flat.flatten` with
impl="reference"; the order of the sum: `reference_device.moved_sumsq`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from zerokern.kernels.triton.ahead import Promises, make_job
from zerokern.kernels.triton.codecs import POINTERS, TYPES
from zerokern.kernels.triton.rows import (
    LAST_ROWS,
    NUM_WARPS,
    ROWS,
    SOME_ROWS,
    TILE_ROWS,
    finish_stats,
    move_tile,
    row_width,
)

__all__ = ["aot_jobs", "move_rows"]

REGISTERS = 104


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


def aot_jobs(every: bool) -> list[dict[str, Any]]:
    """Jobs of `ahead`: both ways, from and to each dtype, with and without sums and a scale on the device."""
    bf16, fp32 = torch.bfloat16, torch.float32
    choices = (
        [(*pair, stats, stats) for pair in product(TYPES, TYPES) for stats in (True, False)]
        if every
        else (
            (bf16, bf16, True, False),
            (fp32, bf16, True, True),
            (bf16, fp32, True, False),
            (bf16, bf16, False, False),
        )
    )
    return [_job(into, *choice) for into in (True, False) for choice in choices]


def _job(into: bool, tensor: torch.dtype, bucket: torch.dtype, stats: bool, factor: bool) -> dict[str, Any]:
    wider = max(tensor.itemsize, bucket.itemsize)
    source, target = (tensor, bucket) if into else (bucket, tensor)
    signature = {"bucket": POINTERS[bucket], "tiles": "*i32", "distances": "*i64", "offsets": "*i64", "numels": "*i64"}
    signature |= {"first": "i64", "scale": "fp32", "follows": "i32"}
    optional = {"stats": "*fp64", "partials": "*fp64", "counter": "*i32"} if stats else {}
    optional |= {"factor": "*fp32"} if factor else {}
    absent = {name: None for name in ("stats", "partials", "counter", "factor") if name not in optional}
    return make_job(
        move_rows,
        f"{source}-{target}-{'in' if into else 'out'}{'-stats' * stats}{'-factor' * factor}".replace("torch.", ""),
        signature | optional,
        absent | {"TYPE": TYPES[tensor], "IN": into, "VEC": 16 // wider, "WIDTH": row_width(wider), "STATS": stats},
        Promises(
            REGISTERS,
            fma={"f64": (ROWS.value + SOME_ROWS.value + LAST_ROWS.value) * 16 // wider} if stats else {},
            wide=tuple(way for way, dtype in (("load", source), ("store", target)) if dtype.itemsize == wider),
            shared=8 * row_width(wider) if stats else 0,
            float64=100 if stats else 0,  # a tree for each tile
        ),
        num_warps=NUM_WARPS,
        aligned=[name for name in ("partials", "counter", "tiles", "distances") if name not in absent],
    )
