"""bf16 models on CPUs that multiply bf16 matrices slowly: products are computed in fp32, nothing is kept in it."""

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
        grad_x = (grad @ weight.float()).to(x.dtype)  # first: the fp32 weight is gone when the fp32 gradient comes
        grad_weight = grad.flatten(0, -2).t() @ x.float().flatten(0, -2)
        return grad_x, grad_weight.to(weight.dtype)


class WideAttention(torch.autograd.Function):
    """Causal attention computed in fp32 from narrow heads; it keeps the narrow ones and computes again for backward."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        ctx.save_for_backward(heads)
        return attend(heads.float()).to(heads.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (heads,) = ctx.saved_tensors
        wide = heads.float().requires_grad_()
        with torch.enable_grad():
            mixed = attend(wide)
        return torch.autograd.grad(mixed, wide, grad.float())[0].to(heads.dtype)


def attend(heads: Tensor) -> Tensor:
    """Causal attention of query, key and value, which lie together as (batch, length, 3, heads, width)."""
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


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
