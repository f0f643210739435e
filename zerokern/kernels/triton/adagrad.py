"""Adagrad's arithmetic, as `reference.adagrad` has it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adagrad(p, g, total, step_size, eps, wd, wdd, coupled, EXACT: tl.constexpr):
    """(p', sum'); g is scaled. Exact sums are made in float64 and rounded once."""
    if EXACT:
        wide = g.to(tl.float64)
        wide = tl.where(coupled, wide + wdd * p.to(tl.float64), wide)
        total = (total.to(tl.float64) + wide * wide).to(tl.float32)
        g = wide.to(tl.float32)
    else:
        g = tl.where(coupled, g + wd * p, g)
        total = total + g * g
    return p - step_size * tl.div_rn(g, tl.sqrt_rn(total) + eps), total
