"""Lion's arithmetic, as `reference.lion` has it."""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton import pairs
from zerokern.kernels.triton.wide import float64_is_scarce


@triton.jit
def _sign(c):
    """-1, 0 or 1 in fp32; NaN stays."""
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, float("nan")))
    return tl.where(c == 0.0, 0.0, sign)


@triton.jit
def lion(
    p, g, m, w1, w2, w2_low, w1d, w2d, lr, decay, EXACT: tl.constexpr, APART: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """(p', m'); g is scaled. Exact states are averaged in float64 and rounded once."""
    if EXACT:
        if float64_is_scarce():
            sign, average, sure = in_pairs(g, m, w1, w2, w2_low)
            sign, m = pairs.settled(sign, average, sure, g, m, m, (w1d, w2d), in_float64, APART, VEC)
        else:
            sign, m = in_float64(g, m, m, (w1d, w2d))
    else:
        difference = g - m
        sign = _sign(m + w1 * difference)
        m = m + w2 * difference
    return p - (decay * p + lr * sign), m


@triton.jit
def in_float64(g, m, _, scalars):
    """(sign, m')."""
    w1, w2 = scalars
    wide = m.to(tl.float64)
    difference = g.to(tl.float64) - wide
    return _sign(wide + w1 * difference), (wide + w2 * difference).to(tl.float32)


@triton.jit
def in_pairs(g, m, w1, w2, w2_low):
    """(sign, m', whether these are sure), with the bits of float64.

    c = fma(w1, difference, m) has the sign of what it rounds, which is off by 2^-23 of the product for two roundings.
    """
    difference, rest = pairs.two_sum(g, -m)
    c = tl.fma(w1, difference, m)
    sure = (tl.abs(c) > tl.abs(difference) * tl.abs(w1 * 4.76837158203125e-07)) | (difference == 0.0)  # 2^-21
    upper, lower, error = pairs.product(w2, w2_low, difference, rest, None)
    average, sure_of_it = pairs.nearest_sum(m, upper, lower, error)
    return _sign(c), average, sure & sure_of_it
