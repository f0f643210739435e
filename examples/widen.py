"""bf16 models on CPUs that multiply bf16 matrices slowly: the products are computed in fp32, nothing is kept in it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class WideLinear(torch.autograd.Function):
    """x @ weight.T computed in fp32, with x, weight and their gradients kept in their own narrow dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.float()
        grad_weight = grad.flatten(0, -2).t() @ x.float().flatten(0, -2)
        return (grad @ weight.float()).to(x.dtype), grad_weight.to(weight.dtype)


def bf16_is_slow(rows: int = 64, width: int = 512, repeat: int = 10) -> bool:
    """Whether this CPU multiplies bf16 matrices far slower than fp32 ones, as those without AVX-512 do (20x)."""

    def seconds(dtype: torch.dtype) -> float:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            x @ weight
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(torch.bfloat16) > 5 * seconds(torch.float32)
