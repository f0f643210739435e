"""Spans of bytes copied by a few programs, wherever they lie: device memory, or pinned host memory that kernels reach.

For lists of small spans between the two, each of which costs a copy engine as much as a large one. Few programs are
enough: the link is slower than one multiprocessor in eight, and compute wants the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zerokern.kernels.spans import WORDS, Span, by_alignment, rows_of
from zerokern.kernels.triton.upload import staged

__all__ = ["WORDS", "ferry", "ferry_spans"]

PROGRAMS = 32  # of 8 KiB in flight each: more than a link of 60 GB/s has on its way in 2 us
TILE = 1024  # words that a program moves at once
NUM_WARPS = 4
_KINDS: dict[int, tuple[Any, int]] = {16: (tl.int64, 2), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""By alignment: the words that are moved, and how many of them one access has."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["spans"])
def ferry_spans(spans, count, WORD: tl.constexpr, VEC: tl.constexpr, TILE: tl.constexpr):
    """Program i copies spans i, i + programs, ... of `count`, whose two addresses are multiples of VEC words."""
    WIDTH: tl.constexpr = WORD.primitive_bitwidth // 8
    at = tl.arange(0, TILE)
    byte = tl.arange(0, 16)
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        dst = tl.load(spans + 3 * row)
        src = tl.load(spans + 3 * row + 1)
        nbytes = tl.load(spans + 3 * row + 2).to(tl.int32)
        words = nbytes // (VEC * WIDTH) * VEC
        for base in range(0, words, TILE):
            target = dst.to(tl.pointer_type(WORD)) + base
            source = src.to(tl.pointer_type(WORD)) + base
            mask = base + at < words
            if VEC > 1:
                target = tl.multiple_of(target, 16)
                source = tl.multiple_of(source, 16)
                mask = tl.max_constancy(mask, VEC)
            tl.store(target + at, tl.load(source + at, mask=mask, other=0), mask=mask)
        if WIDTH > 1:  # less than an access has
            moved = words * WIDTH
            mask = moved + byte < nbytes
            last = tl.load(src.to(tl.pointer_type(tl.int8)) + moved + byte, mask=mask, other=0)
            tl.store(dst.to(tl.pointer_type(tl.int8)) + moved + byte, last, mask=mask)


def ferry(spans: Sequence[Span] | array[int], table: Tensor, programs: int = PROGRAMS) -> None:
    """Copies spans (to, from, bytes), or rows of them, that do not overlap, each below 2 GiB, on the current stream.

    `table`: int64 memory of at least `WORDS` words for each span. The kernel reads it, and its device must reach it:
    pinned host memory, which the caller keeps as it is until the copies have ended. One launch for each alignment.

    >>> import torch
    >>> device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    >>> x, y = torch.tensor([1.0, 2.0], device=device), torch.zeros(2, device=device)
    >>> ferry([(y.data_ptr(), x.data_ptr(), 8)], torch.empty(WORDS, dtype=torch.int64, device=device)); y.tolist()
    [1.0, 2.0]
    """
    begin = 0
    for alignment, some in by_alignment(rows_of(spans)):
        count = len(some) // WORDS
        rows = table[begin : begin + len(some)]
        rows.copy_(staged(some))
        begin += len(some)
        word, vec = _KINDS[alignment]
        ferry_spans[(min(count, programs),)](
            rows, count, WORD=word, VEC=vec, TILE=TILE, num_warps=NUM_WARPS, enable_fp_fusion=False
        )
