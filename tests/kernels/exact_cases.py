"""Adam in float64, and errors against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Hyper:
    """What both optimizers are given."""

    step: int = 10
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


def training_state(numel: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Parameters, bf16-valued gradients and states as in the middle of a run."""
    grad = torch.randn(numel, generator=generator).bfloat16().float()
    return {
        "param": torch.randn(numel, generator=generator) * 0.02,
        "grad": grad,
        "exp_avg": torch.randn(numel, generator=generator) * 0.3,
        "exp_avg_sq": torch.rand(numel, generator=generator),
    }


class Float64:
    """AdamW in float64, from the same fp32 start."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.param, self.exp_avg, self.exp_avg_sq = (state[name].double().numpy() for name in NAMES if name != "grad")

    def step(self, grad: Tensor, h: Hyper) -> None:
        g = grad.double().numpy()
        self.exp_avg = h.beta1 * self.exp_avg + (1 - h.beta1) * g
        self.exp_avg_sq = h.beta2 * self.exp_avg_sq + (1 - h.beta2) * g * g
        corrected = self.exp_avg / (1 - h.beta1**h.step)
        root = np.sqrt(self.exp_avg_sq / (1 - h.beta2**h.step))
        self.param = self.param - h.lr * h.weight_decay * self.param - h.lr * corrected / (root + h.eps)


def theirs(state: dict[str, Tensor], h: Hyper) -> None:
    hyper = {name: value for name, value in vars(h).items() if name != "step"}
    step = [torch.tensor(float(h.step))]
    torch._fused_adamw_(*([state[name]] for name in NAMES), [], step, **hyper, amsgrad=False, maximize=False)


def errors(got: Tensor, truth: np.ndarray, before: np.ndarray | float = 0.0) -> np.ndarray:
    """In ulp of the true value, or of the one before where that is larger: cancelled digits cannot be right."""
    return np.abs(got.double().numpy() - truth) / ulp(np.maximum(np.abs(truth), np.abs(before)))


def ulp(x: np.ndarray) -> np.ndarray:
    """The spacing of fp32 at the values of x, in float64."""
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)
