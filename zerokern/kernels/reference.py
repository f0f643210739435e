"""The truth: every op of `zerokern.kernels.ops` in plain torch, one tensor at a time.

Each function is its own definition: a fixed sequence of IEEE fp32 or fp64 operations, each one rounded to nearest, none
contracted, none flushed to zero. The native kernels give the same bits. Read the docstrings as formulas: F(x) rounds a
double to fp32, f64(x) widens, and scalars are computed in double and rounded once. Arguments are those of the ops,
which also check them; nothing is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.kernels.changed import changed_mask
from zerokern.kernels.reference_codecs import (
    decode_int8,
    encode_int8,
    join,
    mix64,
    random_bits,
    round_stochastic,
    split,
    sqrt,
)
from zerokern.kernels.reference_int8 import adam_int8, fma, step_scalars, to_fp32

__all__ = [
    "accumulate",
    "adagrad",
    "adam",
    "cast",
    "decode_int8",
    "encode_int8",
    "join",
    "lion",
    "muon",
    "sgd",
    "split",
    "sumsq",
]

SUMSQ_CHUNK = 65536
SUMSQ_LANES = 64


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    step: int,
    maximize: bool = False,
    remainder: Tensor | None = None,
    master: Tensor | None = None,
    out: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int = 0,
    first: int = 0,
    changed: Tensor | None = None,
) -> None:
    """One step of Adam, or AdamW where `decoupled`, in place.

    g             where coupled: fma(F(weight_decay), p, g)
    m'            w1 = F(1 - beta1) < 0.5: fma(w1, g - m, m), else fma(-F(beta1), g - m, g), as torch.lerp does
    v'            w2 = F(1 - beta2) < 0.5: fma(w2, max(gap, lowest), v) with gap = fma(g, g, -v), so that an infinite v
                  stays infinite; else, and where gap is infinite, fma(w2 * g, g, F(beta2) * v)
    p'            p - fma(F(lr * weight_decay), p, m' / fma(sqrt(v'), slope, floor))     [fma(0, p, ...) where coupled]
                  with slope and floor of `step_scalars`
    int8 states:  `reference_int8.adam_int8`
    The update uses m' and v' as they are before they are rounded to a lossy state.

    >>> p, g, m, v = torch.ones(2), torch.tensor([0.5, -2.0]), torch.zeros(2), torch.zeros(2)
    >>> adam(p, g, m, v, lr=0.25, step=1)
    >>> p.tolist()
    [0.75, 1.25]
    """
    p = load_master(param, remainder, master)
    random = random_of(p, stochastic_seed, key, step, first)
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        p = adam_int8(
            p,
            grad.float(),
            exp_avg,
            exp_avg_sq,
            exp_avg_scale,
            exp_avg_sq_scale,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            step=step,
            factor=-scale if maximize else scale,
        )
        publish(p, param, remainder, master, out, random, changed)
        return
    g = load_grad(grad, scale, maximize)
    m, v = exp_avg.float(), exp_avg_sq.float()
    coupled = not decoupled and weight_decay != 0.0
    if coupled:
        g = fma(to_fp32(weight_decay), p, g)
    w1, w2 = to_fp32(1.0 - beta1), to_fp32(1.0 - beta2)
    m = fma(w1, g - m, m) if w1 < 0.5 else fma(-to_fp32(beta1), g - m, g)
    if w2 < 0.5:
        gap = fma(g, g, -v)
        late = fma(w2 * g, g, to_fp32(beta2) * v)
        v = fma(w2, torch.where(gap == -math.inf, torch.finfo(torch.float32).min, gap), v)
        v = torch.where(gap == math.inf, late, v)
    else:
        v = fma(w2 * g, g, to_fp32(beta2) * v)
    slope, floor = step_scalars(lr, beta1, beta2, eps, step)
    decay = to_fp32(lr * weight_decay) if decoupled else 0.0
    p = p - fma(decay, p, m / fma(slope, sqrt(v), floor))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    publish(p, param, remainder, master, out, random, changed)


def lion(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    step: int,
    maximize: bool = False,
    remainder: Tensor | None = None,
    master: Tensor | None = None,
    out: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int = 0,
    first: int = 0,
    changed: Tensor | None = None,
) -> None:
    """One step of Lion, in place.

    fp32 state:  c = f64(m) + (1 - beta1) * (f64(g) - f64(m));  m' = F(f64(m) + (1 - beta2) * (f64(g) - f64(m)))
    bf16, int8:  the same in fp32 with F(1 - beta1), F(1 - beta2)
    then:        p' = p - (F(lr * weight_decay) * p + F(lr) * sign(c)), where sign(0) = +0 and sign(NaN) = NaN

    >>> p, m = torch.ones(3), torch.zeros(3)
    >>> lion(p, torch.tensor([5.0, -0.1, 0.0]), m, lr=0.5, step=1)
    >>> p.tolist()
    [0.5, 1.5, 1.0]
    """
    p = load_master(param, remainder, master)
    g = load_grad(grad, scale, maximize)
    m = exp_avg.float() if exp_avg_scale is None else decode_int8(exp_avg, exp_avg_scale)
    if exp_avg.dtype == torch.float32:
        g, m = g.double(), m.double()
    c = m + (1.0 - beta1) * (g - m)
    m = (m + (1.0 - beta2) * (g - m)).float()
    p = p - ((lr * weight_decay) * p + lr * _sign(c))
    if exp_avg_scale is None:
        exp_avg.copy_(m)
    else:
        codes, scales = encode_int8(m)
        exp_avg.copy_(codes)
        exp_avg_scale.copy_(scales.view(exp_avg_scale.shape))
    publish(p, param, remainder, master, out, random_of(p, stochastic_seed, key, step, first), changed)


def adagrad(
    param: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    step: int,
    maximize: bool = False,
    remainder: Tensor | None = None,
    master: Tensor | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int = 0,
    first: int = 0,
    changed: Tensor | None = None,
) -> None:
    """One step of Adagrad, in place.

    fp32 state:  gd = f64(g) [+ weight_decay * f64(p)];  sum' = F(f64(sum) + gd * gd)
    bf16 state:  gd = g [+ F(weight_decay) * p];         sum' = sum + gd * gd        in fp32
    then:        p' = p - F(lr / (1 + (step - 1) * lr_decay)) * (F(gd) / (sqrt(sum') + F(eps)))

    >>> p, total = torch.ones(2), torch.zeros(2)
    >>> adagrad(p, torch.tensor([2.0, -4.0]), total, lr=0.5, step=1)
    >>> p.tolist(), total.tolist()
    ([0.5, 1.5], [4.0, 16.0])
    """
    p = load_master(param, remainder, master)
    g = load_grad(grad, scale, maximize)
    total = state_sum.float()
    exact = state_sum.dtype == torch.float32
    if exact:
        g, total = g.double(), total.double()
    if weight_decay != 0.0:
        g = g + weight_decay * (p.double() if exact else p)
    total = (total + g * g).float()
    p = p - (lr / (1.0 + (step - 1) * lr_decay)) * (g.float() / (sqrt(total) + eps))
    state_sum.copy_(total)
    publish(p, param, remainder, master, out, random_of(p, stochastic_seed, key, step, first), changed)


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_step: bool = False,
    step: int = 1,
    maximize: bool = False,
    remainder: Tensor | None = None,
    master: Tensor | None = None,
    out: Tensor | None = None,
    scale: float = 1.0,
    stochastic_seed: int | None = None,
    key: int = 0,
    first: int = 0,
    changed: Tensor | None = None,
) -> None:
    """One step of SGD, in place.

    d = g [+ weight_decay * p];  b = d where it is the first step, else momentum * buffer + (1 - dampening) * d
    d = d without momentum, d + momentum * b with nesterov, else b;  p' = p - lr * d
    fp32 buffer or none: in f64, with buffer' = F(b), b = f64(buffer') in the second line, and p' = F(f64(p) - lr * d).
    bf16 buffer: in fp32 with F of each scalar; the update uses b as it is before it is rounded to bf16.

    >>> p, buffer = torch.ones(2), torch.tensor([1.0, 0.0])
    >>> sgd(p, torch.tensor([2.0, -4.0]), buffer, lr=0.25, momentum=0.5)
    >>> p.tolist(), buffer.tolist()
    ([0.375, 2.0], [2.5, -4.0])
    """
    p = load_master(param, remainder, master)
    d = load_grad(grad, scale, maximize)
    before = p
    exact = momentum_buffer is None or momentum_buffer.dtype == torch.float32
    if exact:
        d, before = d.double(), p.double()
    if weight_decay != 0.0:
        d = d + weight_decay * before
    if momentum_buffer is not None:
        if first_step:
            b = d
        else:
            b = momentum * momentum_buffer.to(d.dtype) + (1.0 - dampening) * d
        if exact:
            b = b.float().double()
        d = d + momentum * b if nesterov else b
        momentum_buffer.copy_(b)
    p = (before - lr * d).float()
    publish(p, param, remainder, master, out, random_of(p, stochastic_seed, key, step, first), changed)


def muon(
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor,
    sums: Tensor,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
    exp_avg_scale: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """The element-wise half of one step of Muon: the average moves, and `out` is the matrix to be orthogonalized.

    g             scale * grad (-scale where `maximize`); m is the average, decoded where it is int8
    m'            w = F(1 - momentum) < 0.5: fma(w, g - m, m), else fma(-F(momentum), g - m, g), as torch.lerp does
    u             m' without `nesterov`; else F(momentum) < 0.5: fma(F(momentum), m' - g, g), else
                  fma(-F(1 - F(momentum)), m' - g, m'), as torch.lerp does, whose weights are fp32 numbers
    out           u, rounded to nearest even in its dtype; u uses m' as it is before it is rounded to a lossy state
    sums          of the squares of `out` as rounded: of each chunk of 65536 elements, as `sumsq` sums it, in float64

    >>> g, m, out, sums = torch.tensor([4.0, -8.0]), torch.zeros(2), torch.empty(2), torch.empty(1).double()
    >>> muon(g, m, out, sums, momentum=0.75)
    >>> m.tolist(), out.tolist(), sums.tolist()
    ([1.0, -2.0], [1.75, -3.5], [15.3125])
    """
    g = load_grad(grad.reshape(-1), scale, maximize)
    m = (exp_avg.float() if exp_avg_scale is None else decode_int8(exp_avg, exp_avg_scale)).reshape(-1)
    w, kept = to_fp32(1.0 - momentum), to_fp32(momentum)
    m = fma(w, g - m, m) if w < 0.5 else fma(-kept, g - m, g)
    u = m
    if nesterov:
        u = fma(kept, m - g, g) if kept < 0.5 else fma(-to_fp32(1.0 - kept), m - g, m)
    if exp_avg_scale is None:
        exp_avg.copy_(m.view(exp_avg.shape))
    else:
        codes, scales = encode_int8(m)
        exp_avg.copy_(codes.view(exp_avg.shape))
        exp_avg_scale.copy_(scales.view(exp_avg_scale.shape))
    out.copy_(u.view(out.shape))
    chunks = out.reshape(-1).split(SUMSQ_CHUNK) if out.numel() else ()
    sums.copy_(torch.tensor([_sumsq_of_one(chunk) for chunk in chunks], dtype=torch.float64).view(sums.shape))


def sumsq(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements in float64, in a fixed order; nan or inf where an element is not finite.

    A tensor is cut into chunks of 65536 elements. In a chunk, lane j of 64 adds the squares of the elements j, j + 64,
    ... in this order; the lanes are reduced as a tree, lane[j] + lane[j + 32], then 16, 8, 4, 2, 1. The chunks of a
    tensor and then the tensors are added in order.

    >>> sumsq([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
    169.0
    """
    total = 0.0
    for tensor in tensors:
        total += _sumsq_of_one(tensor.reshape(-1))
    return total


def _sumsq_of_one(flat: Tensor) -> float:
    squares = flat.double() * flat.double()
    squares = torch.nn.functional.pad(squares, (0, -flat.numel() % SUMSQ_CHUNK))
    rows = squares.view(-1, SUMSQ_CHUNK // SUMSQ_LANES, SUMSQ_LANES)
    lanes = torch.zeros(rows.shape[0], SUMSQ_LANES, dtype=torch.float64)
    for row in range(min(rows.shape[1], -(-flat.numel() // SUMSQ_LANES))):
        lanes = lanes + rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = 0.0
    for chunk_sum in lanes.reshape(-1).tolist():
        total += chunk_sum
    return total


def cast(src: Tensor, dst: Tensor, *, scale: float = 1.0) -> None:
    """dst = src * F(scale), computed in fp32 and rounded to nearest even in dst's dtype.

    >>> dst = torch.empty(2, dtype=torch.bfloat16)
    >>> cast(torch.tensor([1.0, -3.0]), dst, scale=0.5)
    >>> dst.tolist()
    [0.5, -1.5]
    """
    dst.copy_(src.float() * scale)


def accumulate(dst: Tensor, srcs: Sequence[Tensor], *, add: bool = True, scale: float = 1.0) -> None:
    """dst = dst + F(scale) * s0 + F(scale) * s1 ..., in fp32 from left to right, rounded once to dst's dtype.

    Without `add` the sum starts at s0.

    >>> dst = torch.tensor([1.0])
    >>> accumulate(dst, [torch.tensor([2.0]), torch.tensor([4.0])], scale=0.5)
    >>> dst.tolist()
    [4.0]
    """
    terms = [src.float() * scale for src in srcs]
    if add:
        terms.insert(0, dst.float())
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    dst.copy_(total)


def load_master(param: Tensor, remainder: Tensor | None, master: Tensor | None) -> Tensor:
    if master is not None:
        return master.clone()
    if remainder is not None:
        return join(param, remainder)
    return param.float()


def load_grad(grad: Tensor, scale: float, maximize: bool) -> Tensor:
    g = grad.float()
    return (-g if maximize else g) * scale


def _sign(c: Tensor) -> Tensor:
    sign = (c > 0).float() - (c < 0).float()
    return torch.where(c.isnan(), c.float(), sign)


def random_of(p: Tensor, seed: int | None, key: int, step: int, first: int) -> Tensor | None:
    return None if seed is None else random_bits(mix64(seed, key, step), first, p.numel())


def publish(
    p: Tensor,
    param: Tensor,
    remainder: Tensor | None,
    master: Tensor | None,
    out: Tensor | None,
    random: Tensor | None,
    changed: Tensor | None = None,
) -> None:
    """Stores the new master value, and its published form in `param` and `out`; in `changed` the bits of what becomes
    another there. What `out` was follows from the value before, for it is never read."""
    published = param if out is None or out.dtype == param.dtype else out
    if changed is not None:
        kept = param if master is None and published is param else load_master(param, remainder, master)
        before = kept.to(published.dtype, copy=True)
    if master is not None:
        master.copy_(p)
    if remainder is not None:
        hi, low = split(p, "split8" if remainder.dtype == torch.int8 else "split16")
        param.copy_(hi)
        remainder.copy_(low)
    elif random is not None and param.dtype != torch.float32:
        param.copy_(round_stochastic(p, param.dtype, random))
    else:
        param.copy_(p)
    if out is not None:
        out.copy_(param if out.dtype == param.dtype else p)
    if changed is not None:
        changed |= changed_mask(before, published).view(changed.shape)
