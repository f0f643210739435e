"""Numbers as the sum of two fp32 numbers and a bound of what these leave out: the results of float64 rules, rounded to
fp32 with the same bits, for GPUs on which float64 is scarce (`wide.float64_is_scarce`).

A rule in float64 rounds to fp32 at its end, and fp32 has 29 bits less. So it is enough to know the float64 number to 43
bits, unless it lies nearer than that to the middle of two fp32 numbers: `nearest` and `nearest_sum` say where it does,
and `settled` applies the rule in float64 to these elements. At random that is one in a million; but scalars have few
decimals, and 0.01 times a multiple of 100 has few bits, so it is up to one in a hundred, or in ten for 0.9. What is not
finite, what overflows and what is so small that products lose bits is left to float64 by the same test, for the bound
is then large or NaN.

The bounds. u = 2^-24 is the largest relative error of an fp32 operation. A triple (h, low, error) stands for a float64
number x of the rule, |x - h - low| <= error, and (I) |low| <= 2^-22 |h| + 2^22 error. An error of 0 says x = h + low.
`two_sum` is exact (Knuth), and so is what `fma` makes of a product's last bits (Dekker), from 2^-100 on; below that, an
operation is off by 2^-150 at most, which FLOOR exceeds for all of them together. The steps of the rule are rounded to
2^-53, which is smaller than what is left of each bound. All bounds are computed in fp32, for which there is room too.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["nearest", "nearest_sum", "product", "settled", "square", "total", "two_sum"]

LAST = tl.constexpr(2.0**-44)
FLOOR = tl.constexpr(2.0**-126)  # the smallest that Triton takes for an fp32 number
EXACT_FROM = tl.constexpr(2.0**-100)  # products of 24 bits and 24 bits have their last one above 2^-149


@triton.jit
def two_sum(a, b):
    """(h, low): h is a + b rounded, and h + low is a + b."""
    h = a + b
    part = h - a
    return h, (a - (h - part)) + (b - part)


@triton.jit
def product(w, w_low, h, low, error):
    """w * x of a scalar w = w + w_low (1 + 2^-24) and a triple x, whose low and error may be None. Exact where both are
    fp32 numbers.

    In units of |w h|: w_low * low is left out: 2^-46; the sums for the lower half are rounded: 2^-47 and 1.5 * 2^-46; w
    has 48 bits. Together 0.9 LAST. Of x's error, by (I): 1 for itself, and a quarter each for w_low * low and the last
    sum. (I) for the result: |lower| <= 1.5 * 2^-22 |w h| + 2^22 |w| error, and 2^22 LAST = 2^-22.
    """
    upper = w * h
    lower = tl.fma(w_low, h, tl.fma(w, h, -upper))
    least = tl.where(w_low == 0.0, EXACT_FROM, float("nan"))
    exact = (h == 0.0) | (tl.abs(upper) >= least)
    if low is not None:
        lower = tl.fma(w, low, lower)
        exact = exact & (low == 0.0)
    if error is not None:
        exact = exact & (error == 0.0)
        bound = tl.fma(tl.abs(upper), LAST, tl.fma(tl.abs(1.5 * w), error, FLOOR))
    else:
        bound = tl.fma(tl.abs(upper), LAST, FLOOR)
    return upper, lower, tl.where(exact, 0.0, bound)


@triton.jit
def square(h, low, error):
    """x * x of a triple x.

    |low| <= 2^-22 |h| + 2^22 error, times |h| where the two sums are rounded (3 u together), and times itself where
    low * low is left out: 1.5 * 2^-43 h^2 + 0.75 |h| error + 2^45 error^2; x's own error gives 2 |h| error, and little
    besides.
    """
    upper = h * h
    lower = tl.fma(h, low, tl.fma(h, low, tl.fma(h, h, -upper)))
    exact = (low == 0.0) & (error == 0.0) & ((h == 0.0) | (upper >= EXACT_FROM))
    bound = error * tl.fma(tl.abs(h), 3.0, error * 70368744177664.0)  # 2^46
    bound = bound + tl.fma(upper, 4.0 * LAST, FLOOR)
    return upper, lower, tl.where(exact, 0.0, bound)


@triton.jit
def total(a, a_low, a_error, b, b_low, b_error):
    """The sum of two triples; a may be a number.

    In units of |a| + |b|: the two sums for the lower half are rounded: 2^-46 and 1.25 * 2^-46, and half of the errors.
    1.5 LAST, because of (I) where a and b cancel: |low| <= 1.25 * 2^-22 (|a| + |b|) + 2^22 (a_error + b_error).
    """
    h, low = two_sum(a, b)
    if a_low is not None:
        b_low, b_error = a_low + b_low, a_error + b_error
    error = tl.fma(tl.abs(a) + tl.abs(b), 1.5 * LAST, 1.5 * b_error)
    return h, low + b_low, error


@triton.jit
def nearest(h, low, error):
    """(x rounded to fp32, whether that is sure) of a triple x that is a `total`, or a number.

    Rounding never falls where its argument rises: what both ends of an interval are rounded to, all of it is. The sums
    for the ends are rounded themselves, by u |low| <= 2^-46 |h| + error / 4, and error is above 2^-44 |h|.
    """
    below, above = h + (low - 2.0 * error), h + (low + 2.0 * error)
    return tl.where(low == 0.0, h, above), below == above  # adding 0 would lose the sign of a zero


@triton.jit
def nearest_sum(a, h, low, error):
    """(a + x rounded to float64 and then to fp32, whether that is sure) of a number a and a triple x.

    Ties are common where x has few bits, so a sum that is an fp32 pair is rounded as it is. That is what two roundings
    make of it: either it has 53 bits, and the first one changes nothing, or its lower half is below 2^-28 of the upper,
    and nothing near it is the middle of two numbers. Else, in units of |a| + |h|: the sum of the lower halves and the
    sums for the ends are rounded, by 1.25 * 2^-46 and a quarter of the error each.
    """
    upper, rest = two_sum(a, h)
    lower, lost = two_sum(rest, low)
    exact = (error == 0.0) & (lost == 0.0)
    bound = tl.where(exact, 0.0, tl.fma(tl.abs(a) + tl.abs(h), LAST, 2.0 * error))
    below, above = upper + (lower - bound), upper + (lower + bound)
    return tl.where(lower == 0.0, upper, above), below == above


@triton.jit
def settled(x, y, sure, a, b, c, scalars, RULE: tl.constexpr, APART: tl.constexpr, VEC: tl.constexpr):
    """Tiles x and y, with RULE(a, b, c, scalars) where these are not sure.

    In turn: one element of each group of APART * VEC, which a thread has to itself, so that a few elements that are not
    sure cost a few times what one costs, and not what all of them do.
    """
    unsure = _grouped(1 - sure.to(tl.int32), APART, VEC)
    most = tl.max(tl.sum(tl.sum(unsure, axis=3), axis=0))
    each_a, each_b, each_c = _grouped(a, APART, VEC), _grouped(b, APART, VEC), _grouped(c, APART, VEC)
    each_x, each_y = _grouped(x, APART, VEC), _grouped(y, APART, VEC)
    number = tl.arange(0, APART)[:, None, None, None] * VEC + tl.arange(0, VEC)[None, None, None, :]
    for _ in range(most):
        first = tl.where(unsure != 0, number, APART * VEC)
        first = tl.min(tl.min(first, axis=3), axis=0)
        chosen = (number == first[None, :, :, None]) & (unsure != 0)
        one, other = RULE(_taken(chosen, each_a), _taken(chosen, each_b), _taken(chosen, each_c), scalars)
        each_x = tl.where(chosen, one[None, :, :, None], each_x)
        each_y = tl.where(chosen, other[None, :, :, None], each_y)
        unsure = tl.where(chosen, 0, unsure)
    return tl.reshape(each_x, x.shape), tl.reshape(each_y, y.shape)


@triton.jit
def _grouped(x, APART: tl.constexpr, VEC: tl.constexpr):
    """A tile as [APART, rows, columns, VEC]: what lies along the first axis and the last is in one thread."""
    return tl.reshape(x, (APART, x.shape[0] // APART, x.shape[1] // VEC, VEC))


@triton.jit
def _taken(chosen, x):
    """The chosen element of each group, bit by bit; 0 where there is none."""
    bits = tl.where(chosen, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(tl.sum(bits, axis=3), axis=0).to(tl.float32, bitcast=True)
