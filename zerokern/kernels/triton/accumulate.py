"""dst = cast((dst) + scale * s0 + scale * s1 ...), in fp32 from left to right, for any number of sources in one launch.

Every source is read once, `dst` is read where it is a term and written once. Reference: `reference.accumulate`.
The address of the first source is an argument: where there is one, as in a reduction, nothing is sent beforehand.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.cast import cast
from zerokern.kernels.triton.codecs import TYPES, rounded, widened
from zerokern.kernels.triton.rows import NUM_WARPS, row_width
from zerokern.kernels.triton.upload import upload

__all__ = ["accumulate", "accumulate_tile"]

ROWS = 4  # of a tile, `row_width` elements each


@triton.jit
def _term(address, base, at, mask, scale, TYPE: tl.constexpr, VEC: tl.constexpr):
    src = address.to(tl.pointer_type(TYPE)) + base
    if VEC > 1:
        src = tl.multiple_of(src, VEC * TYPE.primitive_bitwidth // 8)
    return widened(tl.load(src + at, mask=mask)) * scale


@triton.jit
def _sum(
    dst, first, words, count, base, left, scale,
    TYPE: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One tile, `left` elements of it. With VEC > 1 it is whole: so many elements are 16 bytes of the wider dtype."""
    at = tl.arange(0, TILE)
    dst += base
    if VEC > 1:
        mask = None
        dst = tl.multiple_of(dst, VEC * dst.dtype.element_ty.primitive_bitwidth // 8)
    else:
        mask = at < left
    if ADD:
        total = widened(tl.load(dst + at, mask=mask)) + _term(first, base, at, mask, scale, TYPE, VEC)
    else:
        total = _term(first, base, at, mask, scale, TYPE, VEC)
    if words is not None:
        for i in range(1, count):
            total += _term(tl.load(words + i), base, at, mask, scale, TYPE, VEC)
    tl.store(dst + at, rounded(total, dst.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "count", "numel", "scale"], do_not_specialize_on_alignment=["dst", "words"])
def accumulate_tile(
    dst, first: tl.int64, words, count, numel: tl.int64, scale,
    TYPE: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program i adds up tile i of the `count` sources at the addresses `words`, the first of which is
    `first`; there are no words where it is alone. VEC is 1 unless all are aligned."""
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(numel - base, TILE).to(tl.int32)
    if VEC > 1 and left == TILE:
        _sum(dst, first, words, count, base, left, scale, TYPE, ADD, TILE, VEC)
    else:
        _sum(dst, first, words, count, base, left, scale, TYPE, ADD, TILE, 1)


def accumulate(dst: Tensor, srcs: Sequence[Tensor], add: bool, scale: float) -> None:
    """One launch for any number of sources of one dtype."""
    if len(srcs) == 1 and not add:
        cast(dst, srcs[0], scale)
        return
    kind = srcs[0].dtype
    vec = 16 // max(kind.itemsize, dst.itemsize)
    shape = _shape(kind, dst.dtype, all(t.data_ptr() % (vec * t.itemsize) == 0 for t in (dst, *srcs)))
    if numel := dst.numel():
        accumulate_tile[(triton.cdiv(numel, shape["TILE"]),)](
            dst,
            srcs[0].data_ptr(),
            upload(array("Q", [t.data_ptr() for t in srcs]), dst.device) if len(srcs) > 1 else None,
            len(srcs),
            numel,
            scale,
            TYPE=TYPES[kind],
            ADD=add,
            **shape,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _shape(src: torch.dtype, dst: torch.dtype, aligned: bool) -> dict[str, int]:
    """Tile and vector: what is not aligned takes half the elements at once, each of them a load of its own."""
    wider = max(src.itemsize, dst.itemsize)
    tile = ROWS * row_width(wider)
    return {"TILE": tile, "VEC": 16 // wider} if aligned else {"TILE": tile // 2, "VEC": 1}
