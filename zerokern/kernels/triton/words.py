"""Words of the host written to device memory by a kernel: a few from its arguments, more of them from pinned memory.

A copy of so few bytes by the copy engine would queue behind transfers of tens of megabytes on the same engine, and the
stream with it. A kernel waits for nobody: what it reads of pinned memory crosses the link beside these transfers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["ARGUMENTS", "copy", "copy_words", "write", "write_words"]

ARGUMENTS = 16  # words that a launch takes by value: each costs it some 50 ns of the host
BLOCK = tl.constexpr(1024)
NUM_WARPS = 4
_NAMES = [f"w{i}" for i in range(ARGUMENTS)]


@triton.jit(do_not_specialize=["count", *_NAMES], do_not_specialize_on_alignment=["out"])
def write_words(
    out, count,
    w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64, w4: tl.int64, w5: tl.int64, w6: tl.int64, w7: tl.int64,
    w8: tl.int64, w9: tl.int64, w10: tl.int64, w11: tl.int64, w12: tl.int64, w13: tl.int64, w14: tl.int64,
    w15: tl.int64,
):  # fmt: skip
    """out[i] = wi for the first `count` of them."""
    words = (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15)
    for i in tl.static_range(16):
        tl.store(out + i, words[i], mask=i < count)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["out", "words"])
def copy_words(out, words, count):
    """out[i] = words[i] for `count` words, each of which crosses the link once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(words + at, mask=at < count), mask=at < count)


def write(out: Tensor, words: Tensor) -> None:
    """Writes up to `ARGUMENTS` words of a host tensor, by value, to the begin of contiguous int64 device memory."""
    padded = torch.zeros(8 * ARGUMENTS, dtype=torch.uint8, device="cpu")
    padded[: words.nbytes] = words.reshape(-1).view(torch.uint8)
    count = -(-words.nbytes // 8)
    write_words[(1,)](out, count, *padded.view(torch.int64).tolist(), num_warps=1, enable_fp_fusion=False)


def copy(out: Tensor, words: Tensor) -> None:
    """Copies words to the begin of `out` when the stream comes to it: one of them is contiguous pinned host memory."""
    count = words.nbytes // 4
    copy_words[(triton.cdiv(count, BLOCK.value),)](
        out.view(torch.int32), words.reshape(-1).view(torch.int32), count, num_warps=NUM_WARPS, enable_fp_fusion=False
    )
