"""Adam on int8 states in plain torch: the one update with a sequence of its own.

It is lossy anyway and bound by instructions, so products and sums are fused, the block scales and the gradient's factor
are folded into the decay factors, and exp_avg_sq never exists but as the square of its root. The sequence is still a
fixed one. The AVX-512 kernels approximate the reciprocal r to 2^-14, which only the parameter sees; all else has these
bits everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zerokern.kernels.reference_codecs import code_values, encode_values, spread_scale, sqrt

__all__ = ["adam_int8", "fma", "power", "step_scalars", "to_fp32"]


def to_fp32(x: float) -> float:
    """F(x): a double rounded to fp32.

    >>> to_fp32(0.1)
    0.10000000149011612
    """
    return torch.tensor(x, dtype=torch.float32).item()


def power(base: float, exponent: int) -> float:
    """base^exponent in double, by repeated squaring: the same bits on every machine, which `**` does not promise.

    >>> power(0.5, 3), power(0.9, 0)
    (0.125, 1.0)
    """
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def step_scalars(lr: float, beta1: float, beta2: float, eps: float, step: int) -> tuple[float, float]:
    """(slope, floor): the step of a parameter is m' / (sqrt(v') * slope + floor).

    size = lr / (1 - beta1^step);  slope = F(1 / size / sqrt(1 - beta2^step));  floor = F(eps * (1 / size))
    Where size is 0 in fp32, the floor is infinite. The slope stays finite and above 0: a root may be 0, or infinite.

    >>> step_scalars(0.5, 0.5, 0.75, 0.25, 1)
    (2.0, 0.25)
    """
    size = lr / (1.0 - power(beta1, step))
    if to_fp32(size) == 0.0:
        return torch.finfo(torch.float32).max, math.inf
    slope = min(1.0 / size / math.sqrt(1.0 - power(beta2, step)), torch.finfo(torch.float32).max)
    return to_fp32(slope), to_fp32(eps * (1.0 / size))


def fma(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c in fp32, rounded once.

    The product of two fp32 values is exact in float64. The sum is rounded to odd there, which keeps what the second
    rounding, to fp32, needs to know.

    >>> a, c = torch.tensor([1.0 + 2.0**-12]), torch.tensor([2.0**-60])
    >>> fma(a, a, c).item(), (a * a + c).item()
    (1.0004884004592896, 1.00048828125)
    """
    product = a * b.double() if isinstance(a, float) else a.double() * b.double()
    addend = c if isinstance(c, float) else c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(error > 0, math.inf, -math.inf).double()
    odd = torch.where(even & error.isfinite() & (error != 0), torch.nextafter(total, towards), total)
    return odd.float()


def adam_int8(
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor,
    exp_avg_sq_scale: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    factor: float,
) -> Tensor:
    """The new master value; codes and scales are updated in place. `factor` multiplies the raw gradient g.

    coupled:  g = fma(F(weight_decay), p, g * F(factor)), gain1 = F(1 - beta1), gain2 = F(sqrt(1 - beta2))
    else:     gain1 = F(F(1 - beta1) * F(factor)), gain2 = F(F(sqrt(1 - beta2)) * F(factor))
    m'    = fma(c / (254 - |c|), F(beta1) * exp_avg_scale, gain1 * g)
    kept  = code * ((exp_avg_sq_scale / 255) * F(sqrt(beta2)), FLT_MAX where that is infinite);  fresh = gain2 * g
    root' = sqrt(fma(kept, kept, fresh * fresh))
    r     = 1 / fma(root', slope, floor), with slope and floor of `step_scalars`
    p'    = fma(-m', r, fma(-F(lr * weight_decay), p, p))      [0 * p where coupled]
    """
    coupled = not decoupled and weight_decay != 0.0
    factor = to_fp32(factor)
    gain1, gain2 = to_fp32(1.0 - beta1), to_fp32(math.sqrt(1.0 - beta2))
    if coupled:
        g = fma(to_fp32(weight_decay), p, g * factor)
    else:
        gain1, gain2 = to_fp32(gain1 * factor), to_fp32(gain2 * factor)
    decay1 = spread_scale(to_fp32(beta1) * exp_avg_scale.reshape(-1), p)
    root_step = exp_avg_sq_scale.reshape(-1) / torch.full_like(exp_avg_sq_scale.reshape(-1), 255.0)
    kept_step = root_step * math.sqrt(beta2)
    largest = torch.finfo(torch.float32).max
    decay2 = spread_scale(torch.where(kept_step > largest, largest, kept_step), p)

    m = fma(code_values(exp_avg, "exp_avg"), decay1, gain1 * g)
    kept, fresh = code_values(exp_avg_sq, "exp_avg_sq") * decay2, gain2 * g
    root = sqrt(fma(kept, kept, fresh * fresh))
    slope, floor = step_scalars(lr, beta1, beta2, eps, step)
    reciprocal = torch.ones_like(root) / fma(slope, root, floor)
    decay = to_fp32(lr * weight_decay) if decoupled else 0.0
    for value, kind, codes, scale in (
        (m, "exp_avg", exp_avg, exp_avg_scale),
        (root, "exp_avg_sq", exp_avg_sq, exp_avg_sq_scale),
    ):
        new_codes, new_scale = encode_values(value, kind)
        codes.copy_(new_codes)
        scale.copy_(new_scale.view(scale.shape))
    return fma(-m, reciprocal, fma(-decay, p, p))
