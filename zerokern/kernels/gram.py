"""Newton-Schulz by the Gram matrix of the shorter side, of which only the lower half is computed.

With G = X X^T a step multiplies X by P = a I + b G + c G^2, and makes P G P of G. So Q = P_2 P_1 P_0 comes of products
of the shorter side alone, and Q X, one long product, stands for three steps. All squares are polynomials of the first
G, so they are symmetric: of each the lower half is computed, and copied.

An error of G counts where singular values are small: each step that follows multiplies it by a^2. So Q multiplies X,
and G is computed anew of that, before errors have grown too much (`segments_of`).

All is in fp32. bf16 matrices are multiplied by the standard form. With G in bf16 results are up to twice as far from
float64 as the standard form's; with G in fp32, whose products take 4 times as long as bf16's where the CPU has
instructions for these, the iteration is not faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["flops_of", "goes_by_gram", "iterate_gram_", "room_numel", "segments_of"]

Coefficients = tuple[float, float, float]
_LEAST_SHORT = 128
_LEAST_LONG = 1024
_LEAST_NUMEL = 1 << 18
_LEAST_ASPECT = 2
"""Below one of the four the iteration gains less: on one thread 1.26 at 1024 x 128. A batch (`optim.matrices`) has room
for two matrices of this least size and for none that is larger: the second one begins at an address as round as the
first one's, by which bits may be chosen."""
_FIRST_GROWTH = 2.0**8
_LATER_GROWTH = 2.0**3
_BLOCK = 128
"""rows of a square that are computed at once, up to the diagonal: with half as many one thread is 3 % faster, and two,
of which each has few rows then, 10 to 30 % slower"""
_TERMS = 64
"""of Q X that are added up in a row: in longer sums small singular values come out less exact"""
_PANEL_NUMEL = 1 << 17
_LEAST_PANEL = 256


def goes_by_gram(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Returns whether matrices of this shape are multiplied by the Gram matrix: others gain little or nothing.

    >>> [goes_by_gram(*shape, torch.float32) for shape in [(256, 1024), (1024, 512), (128, 1024), (64, 8192)]]
    [True, True, False, False]
    >>> goes_by_gram(256, 1024, torch.bfloat16)
    False
    """
    small, large = sorted((rows, columns))
    is_long = large >= max(_LEAST_LONG, _LEAST_ASPECT * small)
    return dtype is torch.float32 and small >= _LEAST_SHORT and is_long and small * large >= _LEAST_NUMEL


def segments_of(coefficients: Sequence[Coefficients]) -> list[int]:
    """Returns after how many steps each time G is computed anew of X, which Q has been multiplied by.

    An error of an eigenvalue near 0 grows by a^2 in each step that is followed by another one. The first G, of a matrix
    of norm 1, is itself 1 at most. Those that follow have eigenvalues near 1, as many as rows, and errors accordingly;
    so less growth is allowed.

    >>> segments_of([(3.4445, -4.775, 2.0315)] * 5), segments_of([(8.0, -23.0, 17.0)] * 3)
    ([3, 1, 1], [2, 1])
    """
    found: list[int] = []
    growth = math.inf
    for a, _, _ in coefficients:
        if growth > (_FIRST_GROWTH if len(found) == 1 else _LATER_GROWTH):
            found.append(0)
            growth = 1.0
        found[-1] += 1
        growth *= a * a
    return found


def flops_of(rows: int, columns: int, coefficients: Sequence[Coefficients]) -> int:
    """Returns the floating-point operations of the products: of symmetric ones those of the blocks that are computed.

    >>> flops_of(64, 1024, [(1.5, -0.5, 0.0)]) == 2 * 64 * 64 * (1024 + 64 + 1024)
    True
    """
    small, large = sorted((rows, columns))
    half = sum(2 * min(_BLOCK, small - begin) * min(begin + _BLOCK, small) for begin in range(0, small, _BLOCK))
    segments = segments_of(coefficients)
    squares = 4 * len(coefficients) - 3 * len(segments)  # of a segment's n steps n, 2 (n - 1) and n - 1
    return len(segments) * large * (half + 2 * small * small) + squares * half * small


def room_numel(rows: int, columns: int) -> int:
    """Returns how many elements the iteration needs beside a matrix: four small squares and a panel.

    >>> room_numel(4, 64)
    320
    """
    small, large = sorted((rows, columns))
    return 4 * small * small + small * _panel_of(small, large)


def iterate_gram_(
    x: Tensor, norm: float, coefficients: Sequence[Coefficients], halfway: Callable[[], None] | None = None
) -> None:
    """Replaces a matrix by what so many steps make of x / norm. At least one step.

    `halfway` is called in the middle of the steps.

    >>> x = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]])
    >>> iterate_gram_(x, 5.0, [(1.5, -0.5, 0.0)] * 20); x
    tensor([[1., 0., 0., 0.],
            [0., 1., 0., 0.]])
    """
    small, tall = min(x.shape), x.shape[0] > x.shape[1]
    room = x.new_empty(room_numel(*x.shape))
    gram, change, product, total = room[: 4 * small * small].view(4, small, small)
    panel = room[4 * small * small :]
    # by a power of two nothing is rounded; the polynomials of the first segment divide by the rest of the norm
    rest = 1.0
    if norm and math.isfinite(norm):  # of zeros, without eps, all is NaN, as in the standard form
        mantissa, exponent = math.frexp(norm)
        norm, rest = 2.0 ** (exponent - 1), 2.0 * mantissa
    x.div_(norm)
    done, middle = 0, len(coefficients) // 2
    for steps in segments_of(coefficients):
        lying = x.mT if tall else x
        _multiply_lower(lying, lying.mT, gram)
        identity = 1.0  # Q is total and so many times I: the diagonal, added up with the rest, would cost digits
        for number in range(steps):
            if done == middle and halfway is not None:
                halfway()
            a, b, c = coefficients[done]
            b, c = b / rest**2, c / rest**4
            done += 1
            is_last = number == steps - 1
            if is_last:
                a, b, c = a / rest, b / rest, c / rest
            _multiply_lower(gram, gram, change, gram, beta=b, alpha=c)  # P is this and a I
            if not is_last:
                _multiply_lower(change, gram, product, gram, beta=a)
                _multiply_lower(product, change, gram, product, beta=a)
            if number == 0:
                change, total = total, change
            else:
                _multiply_lower(change, total, product, total, beta=a)
                product.add_(change, alpha=identity)
                total, product = product, total
            identity *= a
        _multiply_long(total, identity, x, panel)
        rest = 1.0


def _panel_of(small: int, large: int) -> int:
    """Returns how many columns Q is multiplied by at a time."""
    return min(large, max(_LEAST_PANEL, _PANEL_NUMEL // max(1, small)))


def _multiply_lower(
    a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None = None, *, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """Writes beta * addend + alpha * a @ b, which is symmetric: the lower half, in blocks of rows, and copies it."""
    small = out.shape[0]
    added = out if addend is None else addend
    for begin in range(0, small, _BLOCK):
        rows, end = slice(begin, begin + _BLOCK), min(begin + _BLOCK, small)
        torch.addmm(added[rows, :end], a[rows], b[:, :end], beta=beta, alpha=alpha, out=out[rows, :end])
    for begin in range(_BLOCK, small, _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        out[:begin, rows] = out[rows, :begin].mT


def _multiply_long(total: Tensor, identity: float, x: Tensor, memory: Tensor) -> None:
    """Multiplies the matrix by total + identity * I, panel by panel, on the side of the shorter one."""
    small, large = sorted(x.shape)
    tall = x.shape[0] > x.shape[1]
    diagonal = total.diagonal()
    exact = diagonal.double().add_(identity)
    along = exact.float()
    diagonal.copy_(exact.sub_(along))  # with the rest goes what its rounding leaves
    along = along if tall else along.unsqueeze(1)
    for part in x.split(_panel_of(small, large), 0 if tall else 1):
        made = memory[: part.numel()].view(part.shape)
        for begin in range(0, small, _TERMS):
            some = slice(begin, begin + _TERMS)
            one, other = (part[:, some], total[some]) if tall else (total[:, some], part[some])
            torch.addmm(made, one, other, beta=1.0 if begin else 0.0, out=made)
        torch.addcmul(made, along, part, out=part)
