"""Newton-Schulz on the Gram matrix of the shorter side: two long products in place of ten.

With G = X X^T a step multiplies X by P = a I + b G + c G^2, and makes P G P of G. So Q = P_4 ... P_0 comes of products
of the shorter side alone, and the result is Q X.

G has the squares of the singular values. Rounded as X is, it loses those below the root of what X would lose; and where
they should be 0 it may have small negative eigenvalues, which each step multiplies by a^2. So G and Q are wider than X
(`_Arithmetic`), and X comes between, and G anew of it, before an error of G has grown to a size that counts.

Matrices are passed panel by panel, each converted as it comes; nothing as large as the matrix lies beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.products import add_product, multiply

__all__ = ["goes_by_gram", "iterate_gram_", "room_nbytes", "segments_of"]

Coefficients = tuple[float, float, float]
_LEAST_ASPECT = 8
"""Below it the products of the shorter side, which are wider, take as long as the ten long ones."""
_LEAST_SHORT = 128
_LEAST_NUMEL = 1 << 18
"""Of 64 x 512 and 128 x 1024 calls and conversions take longer than what is saved: 0.85 and 0.87 times the standard
form's speed."""
_BLOCK = 128
"""rows of a square of which only the lower half is computed, and copied: it is symmetric"""
_LEAST_BLOCKED = 512
_TERMS = 64
"""of Q X that fp32 adds up in a row; in longer sums the result is up to 1.3 times as far away as the standard form's"""
_PANEL_NUMEL = 1 << 16
_LEAST_PANEL = 256


class _Arithmetic(NamedTuple):
    """What is multiplied in, and how much an error of G may grow in all.

    `small`: of G, Q and all else with two short sides. Q X is in fp32.
    """

    small: torch.dtype
    most_growth: float


# fp32 in float64: an error of G stays below what rounding X to fp32 makes of it. bf16 in fp32: errors of G stay below
# 1/512, and the results are nearer than bf16's (tests/kernels/test_gram.py).
_BY_DTYPE = {
    torch.float32: _Arithmetic(torch.float64, 2.0**29),
    torch.bfloat16: _Arithmetic(torch.float32, 2.0**15),
}


def goes_by_gram(rows: int, columns: int) -> bool:
    """Returns whether matrices of this shape are multiplied by the Gram matrix; with others that takes longer.

    >>> goes_by_gram(128, 2048), goes_by_gram(128, 1024), goes_by_gram(2048, 300), goes_by_gram(64, 4096)
    (True, False, False, False)
    """
    small, large = sorted((rows, columns))
    return small >= _LEAST_SHORT and large >= _LEAST_ASPECT * small and small * large >= _LEAST_NUMEL


def segments_of(coefficients: Sequence[Coefficients], most_growth: float) -> list[int]:
    """Returns after how many steps each time G is made anew of X, which Q has been multiplied by.

    An eigenvalue near 0, and the error of one, grows by a^2 in each step that is followed by another one.

    >>> segments_of([(3.4445, -4.775, 2.0315)] * 5, 2.0**15), segments_of([(8.0, -23.0, 17.0)] * 5, 2.0**15)
    ([5], [3, 2])
    """
    found: list[int] = []
    growth = math.inf
    for a, _, _ in coefficients:
        if growth > most_growth:
            found.append(0)
            growth = 1.0
        found[-1] += 1
        growth *= a * a
    return found


def room_nbytes(x: Tensor) -> int:
    """Returns the bytes that the iteration needs beside `x`: four small squares and two panels.

    >>> room_nbytes(torch.empty(4, 64)), 8 * (4 * 4 * 4 + 2 * 4 * 64)
    (4608, 4608)
    """
    small, large = sorted(x.shape[-2:])
    width, itemsize = _panel_of(small, large), _BY_DTYPE[x.dtype].small.itemsize
    return x.shape[:-2].numel() * (4 * small * small + 2 * small * width) * itemsize


def iterate_gram_(
    x: Tensor, norm: Tensor, coefficients: Sequence[Coefficients], halfway: Callable[[], None] | None = None
) -> None:
    """Replaces a matrix, or each of a batch, by what so many steps make of x / norm. At least one step.

    `norm`: with as many dimensions as `x`. `halfway` is called in the middle of the steps.

    >>> x = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]])
    >>> iterate_gram_(x, torch.full((1, 1), 5.0), [(1.5, -0.5, 0.0)] * 20); x
    tensor([[1., 0., 0., 0.],
            [0., 1., 0., 0.]])
    """
    how = _BY_DTYPE[x.dtype]
    small, large = sorted(x.shape[-2:])
    width = _panel_of(small, large)
    count = x.shape[:-2].numel()
    squares = torch.empty(4, *x.shape[:-2], small, small, dtype=how.small, device=x.device)
    panels = torch.empty(2, count * small * width, dtype=how.small, device=x.device)
    matrix = _Panels(x, width, panels)
    divisor: Tensor | None = norm
    done, middle = 0, len(coefficients) // 2
    for steps in segments_of(coefficients, how.most_growth):
        gram, change, product, total = squares
        matrix.square(gram, divisor)
        for number in range(steps):
            if done == middle and halfway is not None:
                halfway()
            a, b, c = coefficients[done]
            done += 1
            _add(gram, gram, gram, change, beta=b, alpha=c)  # P is this and a I
            if number < steps - 1:
                _add(gram, change, gram, product, beta=a)
                _add(product, product, change, gram, beta=a)
            if number == 0:
                change, total = total, change
                total.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                _add(total, change, total, product, beta=a)
                total, product = product, total
        matrix.multiply(total, divisor, spare=change)
        divisor = None


class _Panels:
    """A matrix, or a batch, with the shorter side first, whatever its layout: so many columns of it at a time."""

    def __init__(self, x: Tensor, width: int, memory: Tensor) -> None:
        self._x, self._memory, self._width = x, memory, width
        self._tall = x.shape[-2] > x.shape[-1]

    def square(self, out: Tensor, norm: Tensor | None) -> None:
        """Writes the matrix times its transpose."""
        for number, part in enumerate(self._parts()):
            panel = self._converted(part, out.dtype, norm)
            one, other = (panel.mT, panel) if self._tall else (panel, panel.mT)
            _add(out, one, other, out, beta=1.0 if number else 0.0, mirrors=False)
        _mirror(out)

    def multiply(self, by: Tensor, norm: Tensor | None, spare: Tensor) -> None:
        """Multiplies the matrix by a square, which is lost. `spare`: memory of such another one.

        What is rounded to fp32 counts once, at the end. So X is divided by a power of two alone, and the square by the
        rest of the norm. And the diagonal, by far the largest where most singular values are small, comes last: added
        up with the rest it would cost digits in each addition after it. What its rounding leaves is with the rest.
        """
        power: Tensor | None = None
        if norm is not None:
            rest = torch.where(norm.isinf(), 1.0, 2.0 * torch.frexp(norm).mantissa)
            power = norm / rest
            by.div_(rest)
        along = by.diagonal(dim1=-2, dim2=-1)
        diagonal = along.to(torch.float32, copy=True)
        along.sub_(diagonal)
        diagonal = diagonal.unsqueeze(-2 if self._tall else -1)
        if by.dtype is not torch.float32:
            by = spare.view(-1).view(torch.float32)[: by.numel()].view(by.shape).copy_(by)
        for part in self._parts():
            panel = self._converted(part, torch.float32, power)
            made = self._at(1, panel.shape, torch.float32)
            for begin in range(0, by.shape[-1], _TERMS):
                some = slice(begin, begin + _TERMS)
                one, other = by[..., some], panel[..., some] if self._tall else panel[..., some, :]
                one, other = (other, one.mT) if self._tall else (one, other)
                add_product(made, one, other, made, beta=1.0) if begin else multiply(one, other, made)
            part.copy_(made.addcmul_(diagonal, panel))

    def _parts(self) -> Sequence[Tensor]:
        return self._x.split(self._width, -2 if self._tall else -1)

    def _at(self, which: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._memory[which].view(dtype)[: shape.numel()].view(shape)

    def _converted(self, part: Tensor, dtype: torch.dtype, divisor: Tensor | None) -> Tensor:
        panel = self._at(0, part.shape, dtype).copy_(part)
        return panel if divisor is None else panel.div_(divisor)


def _panel_of(small: int, large: int) -> int:
    """Returns how many columns are converted at a time."""
    return min(large, max(_LEAST_PANEL, _PANEL_NUMEL // small))


def _add(
    addend: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float = 1.0, mirrors: bool = True
) -> None:
    """Writes beta * addend + alpha * a @ b, which is symmetric. `out` may be `addend`, of which the lower half is read.

    Only the lower half of what is large is computed; `mirrors`: and copied into the upper one.
    """
    small = out.shape[-1]
    if small < _LEAST_BLOCKED:
        if beta:
            add_product(addend, a, b, out, beta=beta, alpha=alpha)
        else:
            multiply(a, b, out)
        return
    for added, one, other, to in zip(*(x.view(-1, *x.shape[-2:]) for x in (addend, a, b, out)), strict=True):
        for begin in range(0, small, _BLOCK):
            rows, end = slice(begin, begin + _BLOCK), min(begin + _BLOCK, small)
            if beta:
                torch.addmm(added[rows, :end], one[rows], other[:, :end], beta=beta, alpha=alpha, out=to[rows, :end])
            else:
                torch.mm(one[rows], other[:, :end], out=to[rows, :end])
    if mirrors:
        _mirror(out)


def _mirror(square: Tensor) -> None:
    """Copies the lower half of what `_add` has computed by halves into the upper one."""
    small = square.shape[-1]
    if small < _LEAST_BLOCKED:
        return
    for begin in range(_BLOCK, small, _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        square[..., :begin, rows] = square[..., rows, :begin].mT
