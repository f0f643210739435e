"""Lion's arithmetic, as `reference.lion` has it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sign(c):
    """-1, 0 or 1 in fp32; NaN stays."""
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, float("nan")))
    return tl.where(c == 0.0, 0.0, sign)


@triton.jit
def lion(p, g, m, w1, w2, w1d, w2d, lr, decay, EXACT: tl.constexpr):
    """(p', m'); g is scaled. Exact states are averaged in float64 and rounded once."""
    if EXACT:
        wide = m.to(tl.float64)
        difference = g.to(tl.float64) - wide
        sign = _sign(wide + w1d * difference)
        m = (wide + w2d * difference).to(tl.float32)
    else:
        difference = g - m
        sign = _sign(m + w1 * difference)
        m = m + w2 * difference
    return p - (decay * p + lr * sign), m
