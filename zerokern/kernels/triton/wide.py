"""Float64 sums of squares in integers, with the same bits, for GPUs on which float64 is scarce.

From an A100, an H100 or a B200 one asks at least half as many float64 instructions a second as fp32 ones; on a B300, an
L40S or an RTX it is one for 64, and a kernel with one of them for each element waits for these. A sum of squares never
falls and never cancels, so its addition is short in integers: mantissas are aligned, added and rounded to nearest even.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from zerokern.kernels.triton.codecs import widened, widened64

__all__ = ["FAST_FLOAT64", "add_squares", "float64_is_scarce", "squared"]

FAST_FLOAT64 = (80, 90, 100)  # architectures with at least half as many float64 units as fp32 units

_INF = tl.constexpr(0x7FF0000000000000)
_NAN = tl.constexpr(0x7FF8000000000000)


@constexpr_function
def float64_is_scarce():
    """Whether the GPU that a kernel is compiled for has few float64 units, so that sums are made in integers here, and
    `pairs` leaves little of a rule to them.

    Interpreted kernels have numpy's.
    """
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch not in FAST_FLOAT64


@triton.jit
def add_squares(sums, x, ROWS: tl.constexpr):
    """sums [A, B] + the squares of x [ROWS, A, B], row by row in order: each addition is rounded to float64."""
    if float64_is_scarce():
        before = sums.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF  # what is no number may have a sign
        # a mantissa that has bits to round by, a biased exponent, the largest magnitude
        exponent = (before >> 52).to(tl.int32)
        mantissa = (before & 0xFFFFFFFFFFFFF) | (tl.minimum(exponent, 1).to(tl.int64) << 52)
        state = (mantissa.to(tl.uint64) << 10, exponent, exponent * 0)
        mantissa, exponent, largest = _add_rows(state, x, ROWS)
        after = ((exponent - 1).to(tl.int64) << 52) + (mantissa >> 10).to(tl.int64)
        after = tl.where(mantissa == 0, 0, after)
        special = tl.where(largest > 0x7F800000, _NAN, tl.where(largest == 0x7F800000, _INF, 0))
        special = tl.maximum(special, tl.where(before >= _INF, before, 0))
        sums = tl.where(special > 0, special, after).to(tl.float64, bitcast=True)
    else:
        sums = _add_in_float64(sums, x, ROWS)
    return sums


@triton.jit
def squared(x):
    """x * x in float64, which is exact."""
    if float64_is_scarce():
        square, exponent, size = _square(widened(x))
        bits = ((exponent - 1).to(tl.int64) << 52) + (square >> 10).to(tl.int64)
        special = tl.where(size > 0x7F800000, _NAN, tl.where(size == 0x7F800000, _INF, 0))
        bits = tl.where(square == 0, 0, tl.where(special > 0, special, bits))
        return bits.to(tl.float64, bitcast=True)
    else:
        wide = widened64(x)
        return wide * wide


@triton.jit
def _add_in_float64(sums, x, ROWS: tl.constexpr):
    if ROWS > 1:
        first, second = _halves(x, ROWS)
        sums = _add_in_float64(_add_in_float64(sums, first, ROWS // 2), second, ROWS // 2)
    else:
        row = widened64(tl.reshape(x, sums.shape))
        sums = tl.fma(row, row, sums)
    return sums


@triton.jit
def _add_rows(state, x, ROWS: tl.constexpr):
    if ROWS > 1:
        first, second = _halves(x, ROWS)
        state = _add_rows(_add_rows(state, first, ROWS // 2), second, ROWS // 2)
    else:
        state = _add_row(state, widened(tl.reshape(x, state[0].shape)))
    return state


@triton.jit
def _halves(x, ROWS: tl.constexpr):
    halves = tl.reshape(x, (2, ROWS // 2, x.shape[1], x.shape[2]))
    return tl.split(tl.permute(halves, (1, 2, 3, 0)))


@triton.jit
def _square(x):
    """(mantissa from 2^62 on, or 0; biased exponent; magnitude of x, by its bits)."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tiny = size < 0x00800000  # has no leading bit, unless it is made larger
    bits = size.to(tl.float32, bitcast=True)
    bits = tl.where(tiny, bits * 16777216.0, bits).to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | tl.minimum(bits, 0x800000)).to(tl.uint64)  # of zero: 0
    square = m * m  # from 2^46 on, below 2^48
    over = (square >> 47).to(tl.int32)
    return square << (16 - over).to(tl.uint64), 2 * (bits >> 23) + over + tl.where(tiny, 721, 769), size


@triton.jit
def _add_row(state, x):
    mantissa, exponent, largest = state
    square, its_exponent, size = _square(x)
    apart = exponent - its_exponent
    large = tl.where(apart < 0, square, mantissa)
    small = tl.where(apart < 0, mantissa, square)
    shift = tl.minimum(tl.abs(apart), 63).to(tl.uint64)
    aligned = small >> shift
    lost = ((aligned << shift) != small).to(tl.uint64)  # all that counts of what is lost is that there is some
    total = large + (aligned | lost)
    carry = total >> 63
    total = (total >> carry) | (total & carry)
    # to nearest even; a mantissa of 2^63 is made smaller by the next addition, or where it goes into the exponent
    total = (total + 0x1FF + ((total >> 10) & 1)) & 0xFFFFFFFFFFFFFC00
    return total, tl.maximum(exponent, its_exponent) + carry.to(tl.int32), tl.maximum(largest, size)
