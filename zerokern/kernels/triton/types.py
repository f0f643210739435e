"""Torch's dtypes as Triton has them, and the exact ways from the narrow ones to the wide ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["POINTERS", "TYPES", "widened", "widened64"]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}  # in a signature
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def widened(x):
    """The same value in fp32. Interpreted, a cast from bf16 would make zeros of the smallest numbers."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def widened64(x):
    """The same value in float64."""
    if INTERPRETED:
        return widened(x).to(tl.float64)
    else:
        return x.to(tl.float64)
