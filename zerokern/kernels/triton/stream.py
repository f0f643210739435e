"""The roof: reads, updates and writes equally large streams of memory and computes next to nothing.

What an update of as many streams takes above this is its own. As the CPU's: every word is the greatest of those read
at its place and 1.0, and of the updated one itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.triton.upload import upload

__all__ = ["stream", "stream_tile"]

TILE = 1024  # words of each stream
NUM_WARPS = 4


@triton.jit
def _greatest(x, y):
    return tl.where(y > x, y, x)


@triton.jit
def _at(words, stream, base, at, VEC: tl.constexpr):
    pointer = tl.load(words + stream).to(tl.pointer_type(tl.float32)) + base
    if VEC > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + at


@triton.jit
def _update(words, most, base, at, mask, FIRST: tl.constexpr, END: tl.constexpr, VEC: tl.constexpr):
    """Streams FIRST to END, all loads before the first store: a load behind a store would wait for it."""
    if FIRST < END:
        place = _at(words, FIRST, base, at, VEC)
        value = tl.load(place, mask=mask, other=0.0)
        _update(words, most, base, at, mask, FIRST + 1, END, VEC)
        tl.store(place, _greatest(most, value), mask=mask)


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["words"])
def stream_tile(
    words, numel: tl.int64,
    READS: tl.constexpr, UPDATES: tl.constexpr, WRITES: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Program i passes over tile i of `numel` 32-bit words at the addresses `words`: those read, updated, written."""
    base = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(numel - base, TILE).to(tl.int32)
    at = tl.arange(0, TILE)
    mask = tl.max_constancy(at < left, VEC)
    most = tl.full((TILE,), 1.0, tl.float32)
    for i in tl.static_range(READS):
        most = _greatest(most, tl.load(_at(words, i, base, at, VEC), mask=mask, other=0.0))
    _update(words, most, base, at, mask, READS, READS + UPDATES, VEC)
    for i in tl.static_range(READS + UPDATES, READS + UPDATES + WRITES):
        tl.store(_at(words, i, base, at, VEC), most, mask=mask)
    if UPDATES + WRITES == 0:  # never so, but the compiler does not know, and loads that nobody needs are none
        tl.store(_at(words, 0, base, at, VEC), most, mask=mask & (most < 1.0))


def stream(reads: Sequence[Tensor], updates: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """One launch over streams of one size, a multiple of 64 bytes."""
    every = [*reads, *updates, *writes]
    addresses = [t.data_ptr() for t in every]
    numel = every[0].numel() * every[0].itemsize // 4
    stream_tile[(triton.cdiv(numel, TILE),)](
        upload(array("Q", addresses), every[0].device),
        numel,
        READS=len(reads),
        UPDATES=len(updates),
        WRITES=len(writes),
        TILE=TILE,
        VEC=1 if any(address % 16 for address in addresses) else 4,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
