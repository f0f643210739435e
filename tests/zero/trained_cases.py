"""A model and its optimizer, divided in whatever way, seen as one process sees them; and how close two of them are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from worlds import step_and_zero

import zerokern as zk
from zerokern.zero.sharded import Sharded

OF_GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}  # products of other shapes, and sums in another order
OF_PARAMETERS = {"rtol": 1e-3, "atol": 1e-4}  # Adam makes much of gradients near zero


def whole(value: Any) -> Tensor:
    if isinstance(value, Sharded):
        assert value.gather_full is not None
        value = value.gather_full(value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return zk.AdamW(params, **{"lr": 1e-2, "max_grad_norm": 0.5, **settings})


def by_function(params: Any) -> torch.optim.Optimizer:
    """For gradients that zk.clip_grad_norm_ has clipped."""
    return zk.AdamW(params, lr=1e-2)


class Trained:
    """Its module may be a part of a larger one; all ranks that have that part ask for it together."""

    module: nn.Module
    opt: Any

    def step(self) -> None:
        step_and_zero(self.opt)

    def params(self) -> dict[str, Tensor]:
        with zk.gathered(self.module):
            return {name: whole(param).detach().clone() for name, param in self.module.named_parameters()}

    def grads(self) -> dict[str, Tensor]:
        """Of the parameters that have one."""
        found = {name: param.grad for name, param in self.module.named_parameters()}
        return {name: whole(grad).detach().clone() for name, grad in found.items() if grad is not None}


class Plain(Trained):
    """All of the model and of the batch in one process."""

    def __init__(self, model: nn.Module, opt: Any = None) -> None:
        self.model = self.module = model
        self.opt = (opt or make)(model.parameters())

    def backward_of(self, batches: Iterable[tuple]) -> float:
        """The mean loss of these."""
        total, every = 0.0, list(batches)
        for batch in every:
            loss = self.model.loss(*batch) / len(every)
            loss.backward()
            total += loss.item()
        return total


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= 1e-5 * max(1.0, abs(expected))


def check(
    found: dict[str, Tensor], expected: dict[str, Tensor], about: Any, *, exactly: bool = False, **within: float
) -> None:
    """`exactly`: the same bits."""
    assert found.keys() == expected.keys(), about
    for key, value in expected.items():
        if exactly:
            assert torch.equal(found[key], value), (about, key, (found[key] - value).abs().max())
        else:
            torch.testing.assert_close(found[key], value, **within, msg=lambda text, key=key: f"{about} {key}: {text}")
