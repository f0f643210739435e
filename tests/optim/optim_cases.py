"""Parameters, gradients and optimizers that the tests of this folder use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.optim import SGD, Adagrad, Adam, AdamW, Lion

SIZES = (1, 127, 128, 129, 1000)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Every optimizer with settings under which each of its terms counts.
MAKERS: dict[str, Callable[..., Any]] = {
    "adam": lambda params, **kw: Adam(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "adamw": lambda params, **kw: AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "lion": lambda params, **kw: Lion(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "adagrad": lambda params, **kw: Adagrad(params, **{"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1, **kw}),
    "sgd": lambda params, **kw: SGD(params, **{"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, **kw}),
}
STATE_FORMATS = {
    "adam": ("fp32", "bf16", "int8"),
    "adamw": ("fp32", "bf16", "int8"),
    "lion": ("fp32", "bf16", "int8"),
    "adagrad": ("fp32", "bf16"),
    "sgd": ("fp32", "bf16"),
}
EVERY_STATE = [(name, state) for name, states in STATE_FORMATS.items() for state in states]
MASTERS = [
    (FP32, None),
    (BF16, "split16"),
    (BF16, "split8"),
    (BF16, "fp32"),
    (BF16, "none"),
    (FP16, "fp32"),
    (FP16, "none"),
]


def make_params(sizes: Sequence[int] = SIZES, dtype: torch.dtype = FP32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def copies(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


def set_grads(*lists: Sequence[Tensor], seed: int = 1, scale: float = 1.0, via: torch.dtype = BF16) -> None:
    """The same gradients for each list, exact in every dtype that they are cast to."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = (scale * torch.randn(same[0].shape, generator=generator)).to(via)
        for param in same:
            param.grad = grad.to(param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], steps: int, *, start: int = 0, scale: float = 1.0) -> None:
    for step in range(start, start + steps):
        set_grads(params, seed=step, scale=scale)
        optimizer.step()


def contents(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of all parameters and of all their state."""
    state = [optimizer.state[param] for param in params if param in optimizer.state]
    return [*(param.detach().clone() for param in params), *(v.clone() for entry in state for v in entry.values())]


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Equal, NaN for NaN, dtype for dtype."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )
