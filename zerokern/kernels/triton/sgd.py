"""SGD's arithmetic, as `reference.sgd` has it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sgd(
    p, g, buffer, lr, lrd, wd, wdd, momentum, momentumd, undamped, undampedd, coupled, first, nesterov,
    EXACT: tl.constexpr, HAS_BUFFER: tl.constexpr,
):  # fmt: skip
    """(p', buffer'); g is scaled. Without a buffer, or with an exact one, in float64."""
    if EXACT:
        d = g.to(tl.float64)
        before = p.to(tl.float64)
        d = tl.where(coupled, d + wdd * before, d)
        if HAS_BUFFER:
            b = tl.where(first, d, momentumd * buffer.to(tl.float64) + undampedd * d)
            buffer = b.to(tl.float32)
            b = buffer.to(tl.float64)
            d = tl.where(nesterov, d + momentumd * b, b)
        p = (before - lrd * d).to(tl.float32)
    else:
        d = tl.where(coupled, g + wd * p, g)
        if HAS_BUFFER:
            buffer = tl.where(first, d, momentum * buffer + undamped * d)
            d = tl.where(nesterov, d + momentum * buffer, buffer)
        p = p - lr * d
    return p, buffer
