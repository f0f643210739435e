"""Muon's arithmetic, as `reference.muon` has it, and the sums of squares of what it wrote.

The sums are a launch of their own, behind that of the directions: 64 chains of additions are all that a chunk allows,
which is another shape of program than the update's, and few of its threads would have work. It reads what was written
again, 2 or 4 bytes an element, from the second cache as far as that reaches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from zerokern.kernels.triton import sumsq
from zerokern.kernels.triton.rows import sum_halves

__all__ = ["direction_sums", "muon"]

ROW_WORDS = 16
SOME = sumsq.SOME_ROWS


@triton.jit
def muon(g, m, weight, kept, nesterov):
    """(u, m'); g is scaled. Each is one fma from the nearer end, as torch.lerp has it."""
    light = weight < 0.5
    m = tl.fma(tl.where(light, weight, -kept), g - m, tl.where(light, m, g))
    near_grad = kept < 0.5
    u = tl.fma(tl.where(near_grad, kept, -(1.0 - kept)), m - g, tl.where(near_grad, g, m))
    return tl.where(nesterov, u, m), m


@triton.jit(do_not_specialize=["nchunks"])
def direction_sums(
    outcome, rows, chunks, nchunks,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr,
    VEC: tl.constexpr, ROW_WORDS: tl.constexpr,
):  # fmt: skip
    """Program i sums the squares of the chunks `chunks[i * CHUNKS ...]` = (row, chunk within the row) of the rows'
    `out` into the rows' sums. A step that `prepare` skips writes nothing."""
    if tl.load(outcome + 2) != 0.0:
        return
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    some = chunk < nchunks
    row = tl.load(chunks + 2 * chunk, mask=some, other=0).to(tl.int64)
    number = tl.load(chunks + 2 * chunk + 1, mask=some, other=0).to(tl.int64)
    words = rows + row * ROW_WORDS
    first = number * sumsq.CHUNK
    left = tl.minimum(tl.load(words + 8, mask=some, other=0) - first, sumsq.CHUNK).to(tl.int32)
    start = tl.load(words + 7, mask=some, other=0) + first * WIDTH
    sums = sumsq.squares_of_chunks(start, left, TYPE, WIDTH, CHUNKS, ROWS, SOME, VEC)
    to = tl.load(words + 4, mask=some, other=0).to(tl.pointer_type(tl.float64)) + number
    tl.store(to, sum_halves(sums, CHUNKS, sumsq.LANES), mask=some)


def constants(shape: sumsq.Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {**sumsq.constants(shape, dtype), "ROW_WORDS": ROW_WORDS}
