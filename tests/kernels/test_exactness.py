"""The exact path against float64: states rounded once, parameters no further off than torch's own fused AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_cases import SIZES, Row, assert_margins_intact, place, run_op
from torch import Tensor

from zerokern.kernels import ops

# A state is float64's result rounded once: half an ulp, and what float64 itself may be off by before it is rounded.
HALF_ULP = 0.5000001
EDGES = tuple(128 * k + d for k in (1, 2, 8, 512) for d in (-1, 0, 1))
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


def ulp(x: np.ndarray) -> np.ndarray:
    """The spacing of fp32 at the values of x, in float64."""
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


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


def ours(state: dict[str, Tensor], h: Hyper, impl: str) -> None:
    ops.adam(
        *(state[name] for name in NAMES),
        lr=h.lr,
        beta1=h.beta1,
        beta2=h.beta2,
        eps=h.eps,
        weight_decay=h.weight_decay,
        step=h.step,
        impl=impl,
    )


def theirs(state: dict[str, Tensor], h: Hyper) -> None:
    torch._fused_adamw_(
        *([state[name]] for name in NAMES),
        [],
        [torch.tensor(float(h.step))],
        lr=h.lr,
        beta1=h.beta1,
        beta2=h.beta2,
        weight_decay=h.weight_decay,
        eps=h.eps,
        amsgrad=False,
        maximize=False,
    )


def errors(got: Tensor, truth: np.ndarray, before: np.ndarray | float = 0.0) -> np.ndarray:
    """In ulp of the true value, or of the one before where that is larger: cancelled digits cannot be right."""
    return np.abs(got.double().numpy() - truth) / ulp(np.maximum(np.abs(truth), np.abs(before)))


def assert_states_rounded_once(before: dict[str, Tensor], after: dict[str, Tensor], h: Hyper) -> None:
    wide = np.longdouble
    g, m, v = (before[name].double().numpy().astype(wide) for name in ("grad", "exp_avg", "exp_avg_sq"))
    terms = {
        "exp_avg": (wide(h.beta1) * m, (wide(1) - wide(h.beta1)) * g),
        "exp_avg_sq": (wide(h.beta2) * v, (wide(1) - wide(h.beta2)) * g * g),
    }
    for name, (kept, fresh) in terms.items():
        truth = kept + fresh
        size = ulp(truth)
        # Where kept and fresh cancel, float64 rounds at their size and not at that of their sum.
        cancelled = 8 * 2.0**-53 * (np.abs(m) + np.abs(g)).astype(np.float64) / size if name == "exp_avg" else 0.0
        error = np.abs(after[name].double().numpy().astype(wide) - truth).astype(np.float64) / size
        assert (error <= HALF_ULP + cancelled).all(), f"{name}: off by {error.max()} ulp"


@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
def test_states_are_rounded_once_at_every_size(impl: str, misaligned: bool, every: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    h = Hyper()
    rows, before = [], []
    for numel in (*range(258), *EDGES) if every or misaligned else (*SIZES[:-1], *EDGES):
        state = training_state(numel, generator)
        row = Row({})
        for name, value in state.items():
            place(row, name, value, misaligned)
        rows.append(row)
        before.append(state)
    run_op("adam", rows, vars(h), impl)
    for row, state in zip(rows, before, strict=True):
        assert_states_rounded_once(state, row.tensors, h)
    assert_margins_intact(rows)


HYPERS = [
    Hyper(step=step, lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    for step, lr, weight_decay, beta1, beta2 in (
        (1, 1e-3, 0.01, 0.9, 0.999),
        (2, 1e-4, 0.0, 0.9, 0.999),
        (5, 0.1, 0.0, 0.9, 0.95),
        (20, 0.03, 0.1, 0.8, 0.999),
        (100, 1e-4, 0.01, 0.9, 0.95),
        (500, 0.37, 0.1, 0.9, 0.999),
        (1000, 3e-3, 0.01, 0.9, 0.99),
        (3000, 0.03, 0.1, 0.95, 0.999),
    )
]


@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
def test_no_parameter_is_further_off_than_torch_fused(impl: str, misaligned: bool) -> None:
    """One step from the middle of a run, pooled over hyperparameters, and elements at every place of a tensor."""
    pooled: dict[str, list[np.ndarray]] = {"ours": [], "theirs": []}
    for number, h in enumerate(HYPERS):
        state = training_state((1 << 17) + 3, torch.Generator().manual_seed(number))
        truth = Float64(state)
        start = truth.param
        truth.step(state["grad"], h)
        row = Row({})
        for name, value in state.items():
            place(row, name, value, misaligned)
        ours(row.tensors, h, impl)
        assert_states_rounded_once(state, row.tensors, h)
        theirs(state, h)
        pooled["ours"].append(errors(row["param"], truth.param, start))
        pooled["theirs"].append(errors(state["param"], truth.param, start))
    our_error, their_error = (np.concatenate(pooled[who]) for who in ("ours", "theirs"))
    assert our_error.mean() <= their_error.mean()
    assert np.square(our_error).mean() <= np.square(their_error).mean()
    assert our_error.max() <= their_error.max()


def schedule(step: int) -> Hyper:
    """Hyperparameters that change: warm-up and decay of lr, betas and weight decay in stages."""
    lr = 1e-2 * min(step / 100, 1.0) * (0.5 if step > 600 else 1.0)
    return Hyper(
        step=step,
        lr=lr,
        beta1=0.9 if step <= 400 else 0.85,
        beta2=0.999 if step <= 700 else 0.99,
        weight_decay=(0.0, 0.1, 0.01)[step // 200 % 3],
    )


def test_a_thousand_steps_stay_no_further_from_float64_than_torch_fused(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    numel = 1 << 13
    start = {
        "param": torch.randn(numel, generator=generator),
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
    }
    our_state = {name: tensor.clone() for name, tensor in start.items()}
    their_state = {name: tensor.clone() for name, tensor in start.items()}
    truth = Float64(start)
    scale = 10.0 ** (torch.rand(numel, generator=generator) * 4 - 3)
    for step in range(1, 1001):
        grad = torch.randn(numel, generator=generator) * scale
        h = schedule(step)
        truth.step(grad, h)
        ours(our_state | {"grad": grad}, h, impl)
        theirs(their_state | {"grad": grad}, h)
    for name in ("exp_avg", "exp_avg_sq", "param"):
        our_error = errors(our_state[name], getattr(truth, name))
        their_error = errors(their_state[name], getattr(truth, name))
        assert our_error.mean() <= their_error.mean(), name
        assert np.quantile(our_error, 0.99) <= np.quantile(their_error, 0.99), name
