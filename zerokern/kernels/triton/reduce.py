"""Sums in an order that is written down: the same bits on every GPU, in every run and in the interpreter.

A sum over an axis of two elements has no order, so every level of a tree is one. What `tl.sum` makes of a longer axis
depends on the layout that the compiler chose. The order in terms of torch: `zerokern.kernels.reference_device`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerokern.kernels.triton.types import widened64

__all__ = ["COLUMNS", "add_squares", "is_last_program", "sum_columns", "sum_halves", "sum_pairs"]

COLUMNS = tl.constexpr(1024)


@triton.jit
def add_squares(sums, x, ROWS: tl.constexpr):
    """sums [A, B] + the squares of x [ROWS, A, B], row by row in order."""
    if ROWS > 1:
        halves = tl.reshape(x, (2, ROWS // 2, x.shape[1], x.shape[2]))
        first, second = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        sums = add_squares(add_squares(sums, first, ROWS // 2), second, ROWS // 2)
    else:
        row = widened64(tl.reshape(x, sums.shape))
        sums = tl.fma(row, row, sums)
    return sums


@triton.jit
def sum_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Each row of x [ROWS, WIDTH] to one element: x[j] + x[j + WIDTH / 2], and so on with the halves."""
    if WIDTH > 1:
        x = sum_halves(tl.sum(tl.reshape(x, (ROWS, 2, WIDTH // 2)), axis=1), ROWS, WIDTH // 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def sum_pairs(x, WIDTH: tl.constexpr):
    """x [WIDTH] to a scalar: x[2 j] + x[2 j + 1], and so on with the pairs."""
    if WIDTH > 1:
        x = sum_pairs(tl.sum(tl.reshape(x, (WIDTH // 2, 2)), axis=1), WIDTH // 2)
    else:
        x = tl.sum(x, axis=0)
    return x


@triton.jit
def sum_columns(partials, count):
    """Column j of 1024 adds the partial sums j, j + 1024, ... in order; then the columns by halves."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, count, COLUMNS):
        # past the L1 cache, which knows nothing of what other programs wrote
        total += tl.load(partials + start + column, mask=start + column < count, other=0.0, cache_modifier=".cg")
    return tl.sum(sum_halves(tl.reshape(total, (1, COLUMNS)), 1, COLUMNS), axis=0)


@triton.jit
def is_last_program(counter):
    """Whether all other programs of the launch are past this line, their stores visible. Resets the counter if so."""
    tl.debug_barrier()  # the stores of all threads, before the one thread that counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(counter, 0)
    return last
