"""SGD's arithmetic, as `reference.sgd` has it."""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton import pairs
from zerokern.kernels.triton.wide import float64_is_scarce


@triton.jit
def sgd(
    p, g, buffer, lr, lr_low, lrd, wd, wd_low, wdd, momentum, momentum_low, momentumd, undamped, undamped_low,
    undampedd, coupled, first, nesterov, EXACT: tl.constexpr, HAS_BUFFER: tl.constexpr, APART: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """(p', buffer'); g is scaled. Without a buffer, or with an exact one, in float64."""
    if EXACT:
        scalars = (lrd, wdd, momentumd, undampedd, coupled, first, nesterov, HAS_BUFFER)
        if float64_is_scarce():
            narrow = (lr, lr_low, wd, wd_low, momentum, momentum_low, undamped, undamped_low)
            after, kept, sure = in_pairs(p, g, buffer, narrow, coupled, first, nesterov, HAS_BUFFER)
            p, buffer = pairs.settled(after, kept, sure, p, g, buffer, scalars, in_float64, APART, VEC)
        else:
            p, buffer = in_float64(p, g, buffer, scalars)
    else:
        d = tl.where(coupled, g + wd * p, g)
        if HAS_BUFFER:
            buffer = tl.where(first, d, momentum * buffer + undamped * d)
            d = tl.where(nesterov, d + momentum * buffer, buffer)
        p = p - lr * d
    return p, buffer


@triton.jit
def in_float64(p, g, buffer, scalars):
    """(p', buffer')."""
    lr, wd, momentum, undamped, coupled, first, nesterov, HAS_BUFFER = scalars
    d = g.to(tl.float64)
    before = p.to(tl.float64)
    d = tl.where(coupled, d + wd * before, d)
    if HAS_BUFFER:
        b = tl.where(first, d, momentum * buffer.to(tl.float64) + undamped * d)
        buffer = b.to(tl.float32)
        b = buffer.to(tl.float64)
        d = tl.where(nesterov, d + momentum * b, b)
    return (before - lr * d).to(tl.float32), buffer


@triton.jit
def in_pairs(p, g, buffer, narrow, coupled, first, nesterov, HAS_BUFFER: tl.constexpr):
    """(p', buffer', whether these are sure), with the bits of float64."""
    lr, lr_low, wd, wd_low, momentum, momentum_low, undamped, undamped_low = narrow
    d = g
    low = tl.zeros_like(g)
    error = low
    if coupled:
        h, rest, its = pairs.product(wd, wd_low, p, None, None)
        d, low, error = pairs.total(d, None, None, h, rest, its)
    if HAS_BUFFER:
        b, b_low, b_error = d, low, error
        if not first:
            kept, kept_low, kept_error = pairs.product(momentum, momentum_low, buffer, None, None)
            h, rest, its = pairs.product(undamped, undamped_low, d, low, error)
            b, b_low, b_error = pairs.total(kept, kept_low, kept_error, h, rest, its)
        buffer, sure = pairs.nearest(b, b_low, b_error)
        if nesterov:
            h, rest, its = pairs.product(momentum, momentum_low, buffer, None, None)
            d, low, error = pairs.total(d, low, error, h, rest, its)
        else:
            d = buffer
            low = tl.zeros_like(g)
            error = low
    h, rest, its = pairs.product(lr, lr_low, d, low, error)
    # not -h, which Triton 3.6 makes 0 - h of: a zero would lose its sign
    p, sure_of_it = pairs.nearest_sum(p, h * -1.0, -rest, its)
    if HAS_BUFFER:
        sure_of_it = sure & sure_of_it
    return p, buffer, sure_of_it
