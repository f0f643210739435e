"""dst = cast(scale * src): reads one, writes the other, in one pass. Reference: `reference.cast`."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.ahead import Promises, make_job
from zerokern.kernels.triton.codecs import POINTERS, TYPES
from zerokern.kernels.triton.rows import NUM_WARPS, TILE_ROWS, move_tile, row_width

__all__ = ["aot_jobs", "cast", "cast_tile"]

REGISTERS = 96


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


def aot_jobs(every: bool) -> list[dict[str, Any]]:
    """Jobs of `ahead`: from and to each dtype."""
    pairs = product(TYPES, TYPES) if every else ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16))
    return [_job(src, dst, src.itemsize if src.itemsize > dst.itemsize else dst.itemsize) for src, dst in pairs]


def _job(src: torch.dtype, dst: torch.dtype, wider: int) -> dict[str, Any]:
    return make_job(
        cast_tile,
        f"{src}-{dst}".replace("torch.", ""),
        {"dst": POINTERS[dst], "src": POINTERS[src], "numel": "i64", "scale": "fp32"},
        {"VEC": 16 // wider, "WIDTH": row_width(wider)},
        Promises(REGISTERS, wide=tuple(w for w, t in (("load", src), ("store", dst)) if t.itemsize == wider)),
        num_warps=NUM_WARPS,
    )
