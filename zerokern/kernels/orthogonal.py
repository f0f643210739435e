"""Muon's whole-matrix half: the Newton-Schulz iteration by torch's matmul, and how its result is applied.

`ops.muon` writes a matrix and the sums of its squares; `iterate_` replaces the matrix by its orthogonal factor,
roughly; the existing rule `sgd` applies that, with the two settings of `apply_settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float
from typing import cast

import torch
from torch import Tensor

from zerokern.core.errors import got
from zerokern.kernels.gram import goes_by_gram, iterate_gram_, room_numel
from zerokern.kernels.products import add_product, multiply

__all__ = [
    "COEFFICIENTS",
    "EPS",
    "STEPS",
    "adjusted_lr",
    "apply_settings",
    "each_step",
    "iterate_",
    "workspace_numel",
]

COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7
STEPS = 5
"""as `torch.optim.Muon` has them unless told otherwise"""
Coefficients = tuple[float, float, float]
_RULES = (None, "original", "match_rms_adamw")


def iterate_(
    x: Tensor,
    sums: Tensor,
    coefficients: Coefficients | Sequence[Coefficients] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    halfway: Callable[[], None] | None = None,
    form: str = "standard",
) -> None:
    """Replaces a matrix, or each of a batch of equal ones, by what the iteration makes of it. Nothing is checked.

    X = x / max(norm, eps); then `steps` times A = X X^T, X = a X + (b A + c A A) X, of the transpose where a matrix has
    more rows than columns. All products are torch's, in the dtype of `x`: on one device they have the bits of
    `torch.optim.Muon`'s iteration from the same X. X itself differs: torch rounds the norm to bf16, here it is the root
    of `sums` in fp32, which is nearer to the truth. Nothing waits for a GPU. All of a batch is multiplied at once where
    that leaves the bits as they are (`products`).

    Args:
        x: (rows, cols), or (k, rows, cols), contiguous, in fp32 or bf16.
        sums: float64 sums of squares of the chunks of each matrix, as `ops.muon` writes them: (chunks,) or (k, chunks).
        coefficients: of all steps, or a sequence of them, one for each step.
        halfway: is called in the middle of the steps: for what goes on beside them.
        form: "gram" multiplies fp32 matrices that are long enough by polynomials of their Gram matrix, one by one
            (`gram`).

    >>> x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> iterate_(x, torch.tensor([25.0], dtype=torch.float64), (1.5, -0.5, 0.0), 20); x
    tensor([[1., 0.],
            [0., 1.]])
    """
    torch.get_num_threads()  # sets this thread up as the program has asked: else MKL multiplies with its own default
    by = each_step(coefficients, steps)
    if steps > 0 and form == "gram" and goes_by_gram(x.shape[-2], x.shape[-1], x.dtype):
        matrices, each_sums = x.view(-1, *x.shape[-2:]), sums.view(-1, sums.shape[-1]).tolist()
        for number, (one, some) in enumerate(zip(matrices, each_sums, strict=True)):
            iterate_gram_(one, _norm(some, eps), by, halfway if number == len(matrices) // 2 else None)
        return
    norm: float | list[float] | Tensor
    if x.device.type != "cpu":
        norm = _norms(sums, eps)
    elif x.dim() == 2:
        norm = _norm(sums.tolist(), eps)
    else:
        norm = [_norm(some, eps) for some in sums.tolist()]
    room = torch.empty(workspace_numel(x), dtype=x.dtype, device=x.device)
    _iterate(x, norm, room, by, halfway)


def each_step(coefficients: Coefficients | Sequence[Coefficients], steps: int) -> Sequence[Coefficients]:
    """Returns the coefficients of each step, where all have the same, or each has its own.

    >>> each_step((1.5, -0.5, 0.0), 2), each_step([(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)], 2)
    ([(1.5, -0.5, 0.0), (1.5, -0.5, 0.0)], [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)])
    """
    if steps and isinstance(coefficients[0], Sequence):
        return cast("Sequence[Coefficients]", coefficients)
    return [cast("Coefficients", coefficients)] * steps


def workspace_numel(x: Tensor, form: str = "standard") -> int:
    """Returns how many elements of its dtype the iteration needs beside `x`: for each matrix its own and those of two
    small squares; or, for one at a time, four squares and a panel (`gram`).

    >>> workspace_numel(torch.empty(10, 4)), workspace_numel(torch.empty(8, 10, 4))
    (72, 576)
    """
    rows, cols = x.shape[-2:]
    if form == "gram" and goes_by_gram(rows, cols, x.dtype):
        return room_numel(rows, cols)
    return x.shape[:-2].numel() * (rows * cols + 2 * min(rows, cols) ** 2)


def adjusted_lr(lr: float, rule: str | None, shape: Sequence[int]) -> float:
    """Returns the learning rate of a matrix of this shape.

    "original", or None, multiplies by sqrt(max(1, rows / cols)); "match_rms_adamw" by 0.2 * sqrt(max(rows, cols)),
    which gives updates the size of AdamW's. Both as `torch.optim.Muon` has them. Of a batch the last two sizes count.

    >>> adjusted_lr(0.1, "original", (400, 100)), adjusted_lr(0.1, None, (100, 400))
    (0.2, 0.1)
    """
    if rule not in _RULES:
        raise ValueError(got("adjust_lr_fn", rule, "None, 'original' or 'match_rms_adamw'"))
    rows, cols = shape[-2:]
    if rule == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, cols)))
    return lr * math.sqrt(max(1.0, rows / cols)) if cols else lr


def apply_settings(lr: float, adjusted: float, weight_decay: float) -> dict[str, float]:
    """Returns the two settings with which the rule `sgd`, without momentum, applies the result O as its gradient.

    Muon's p' = (1 - lr * weight_decay) p - adjusted * O is p' = p - adjusted * (O + weight_decay' * p) with
    weight_decay' = weight_decay * lr / adjusted. Without a buffer the rule computes in float64 and rounds once, where
    torch's two statements round the decay factor, its product and the sum: so it is never further from the truth, and
    with `split16` the rounded bits are kept as with every other rule.

    >>> apply_settings(0.1, 0.2, 0.5)
    {'lr': 0.2, 'weight_decay': 0.25}
    """
    return {"lr": adjusted, "weight_decay": weight_decay * lr / adjusted if adjusted else 0.0}


def _norm(chunk_sums: Sequence[float], least: float) -> float:
    """max(norm, least) in fp32 on a CPU, chunks added in order: `sumsq`'s sum. A NaN stays."""
    total = 0.0
    for some in chunk_sums:
        total += some
    norm, bound = c_float(math.sqrt(total)).value, c_float(least).value
    return bound if norm < bound else norm


def _norms(chunk_sums: Tensor, least: float) -> Tensor:
    """The same on a GPU: (1, 1) for the chunks of one matrix, (k, 1, 1) for those of a batch.

    Never without dimensions: a bf16 matrix would then be divided by a norm that was rounded to bf16.
    """
    return chunk_sums.sum(-1).sqrt().float().clamp_(min=least)[..., None, None]


def _divide(x: Tensor, norm: float | list[float] | Tensor, out: Tensor) -> None:
    if isinstance(norm, list):  # four times as fast as by a tensor of another dtype, and with the same bits
        for one, number, to in zip(x, norm, out, strict=True):
            torch.div(one, number, out=to)
    else:
        torch.div(x, norm, out=out)


def _iterate(
    x: Tensor,
    norm: float | list[float] | Tensor,
    room: Tensor,
    by: Sequence[Coefficients],
    halfway: Callable[[], None] | None = None,
) -> None:
    """The iteration on a matrix, or on a batch. X and its successor change places in the memory of `x` and in `room`.

    A matrix with more rows than columns starts as a transposed view, and all that follows is laid out as its transpose
    is: in the layouts of torch's own iteration, so that products take the same way through its libraries.
    """
    steps = len(by)
    tall = x.shape[-2] > x.shape[-1]
    small, large = sorted(x.shape[-2:])
    batch = x.shape[:-2]
    count = math.prod(batch)
    lying = (*batch, small, large)
    square = (*batch, small, small)
    ends = [x.numel(), x.numel() + count * small * small, x.numel() + 2 * count * small * small]
    other, gram, change = room[: ends[0]].view(lying), room[ends[0] : ends[1]], room[ends[1] : ends[2]]
    gram, change = gram.view(square), change.view(square)
    mine = x.view(lying)  # the same memory
    if tall or steps % 2 == 0:
        _divide(x, norm, x)
        now, following = x.mT if tall else x, other
    else:
        _divide(x, norm, other)
        now, following = other, mine
    for step, (a, b, c) in enumerate(by):
        if step == steps // 2 and halfway is not None:
            halfway()
        multiply(now, now.mT, gram)
        add_product(gram, gram, gram, change, beta=b, alpha=c)
        add_product(now, change, now, following, beta=a)
        now, following = following, mine if following is other else other
    if not steps and halfway is not None:
        halfway()
    if tall and steps:
        if now is mine:
            now = other.copy_(mine)
        x.copy_(now.mT)
