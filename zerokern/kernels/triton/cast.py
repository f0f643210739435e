"""dst = cast(scale * src): reads one, writes the other, in one pass. Reference: `reference.cast`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.rows import NUM_WARPS, TILE_ROWS, move_tile, row_width

__all__ = ["cast", "cast_tile"]


@triton.jit(do_not_specialize=["numel", "scale"], do_not_specialize_on_alignment=["dst", "src"])
def cast_tile(dst, src, numel: tl.int64, scale, VEC: tl.constexpr, WIDTH: tl.constexpr):
    """Program i casts tile i."""
    base = tl.program_id(0).to(tl.int64) * (TILE_ROWS * WIDTH)
    left = tl.minimum(numel - base, TILE_ROWS * WIDTH).to(tl.int32)
    move_tile(src, dst, base, left, scale, VEC, WIDTH, False)


def cast(dst: Tensor, src: Tensor, scale: float) -> None:
    """One launch; `dst` may be `src` itself."""
    wider = max(src.itemsize, dst.itemsize)
    width = row_width(wider)
    if numel := src.numel():
        grid = (triton.cdiv(numel, TILE_ROWS.value * width),)
        cast_tile[grid](
            dst, src, numel, scale, VEC=16 // wider, WIDTH=width, num_warps=NUM_WARPS, enable_fp_fusion=False
        )  # fmt: skip
