"""Adagrad's arithmetic, as `reference.adagrad` has it."""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton import pairs
from zerokern.kernels.triton.wide import float64_is_scarce


@triton.jit
def adagrad(
    p, g, total, step_size, eps, wd, wd_low, wdd, coupled,
    EXACT: tl.constexpr, APART: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """(p', sum'); g is scaled. Exact sums are made in float64 and rounded once."""
    if EXACT:
        if float64_is_scarce():
            decayed, added, sure = in_pairs(p, g, total, wd, wd_low, coupled)
            g, total = pairs.settled(decayed, added, sure, p, g, total, (wdd, coupled), in_float64, APART, VEC)
        else:
            g, total = in_float64(p, g, total, (wdd, coupled))
    else:
        g = tl.where(coupled, g + wd * p, g)
        total = total + g * g
    return p - step_size * tl.div_rn(g, tl.sqrt_rn(total) + eps), total


@triton.jit
def in_float64(p, g, total, scalars):
    """(gd, sum')."""
    wd, coupled = scalars
    wide = g.to(tl.float64)
    wide = tl.where(coupled, wide + wd * p.to(tl.float64), wide)
    return wide.to(tl.float32), (total.to(tl.float64) + wide * wide).to(tl.float32)


@triton.jit
def in_pairs(p, g, total, wd, wd_low, coupled):
    """(gd, sum', whether these are sure), with the bits of float64."""
    low = tl.zeros_like(g)
    error = low
    if coupled:
        upper, lower, its = pairs.product(wd, wd_low, p, None, None)
        g, low, error = pairs.total(g, None, None, upper, lower, its)
    decayed, sure = pairs.nearest(g, low, error)
    upper, lower, error = pairs.square(g, low, error)
    added, sure_of_it = pairs.nearest_sum(total, upper, lower, error)
    return decayed, added, sure & sure_of_it
