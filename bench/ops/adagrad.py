"""Adagrad, the full step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..contest import Contest, Request
from ..ours import step_contests
from ..step import Algorithm, Format

HYPER = {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.01, "step": 10}


def scalars(hyper: Mapping[str, float]) -> dict[str, float]:
    return {"step_size": hyper["lr"] / (1 + (hyper["step"] - 1) * hyper["lr_decay"])}


def update(
    param: torch.Tensor, grad: torch.Tensor, states: tuple[torch.Tensor, ...], scalar: Mapping[str, float]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    (total,) = states
    grad = grad + HYPER["weight_decay"] * param
    total = total + grad * grad
    return param - scalar["step_size"] * (grad / (torch.sqrt(total) + HYPER["eps"])), (total,)


ALGORITHM = Algorithm(
    name="adagrad",
    states=("sum",),
    hyper=HYPER,
    scalars=scalars,
    update=update,
    formats=(Format("split16", "fp32"), Format("split16", "bf16")),
    optimizer="Adagrad",
    public_hyper={key: HYPER[key] for key in ("lr", "lr_decay", "eps", "weight_decay")},
    initial={"sum": lambda noise: noise.square() * 0.01 + 1e-3},
)


def contests(request: Request) -> list[Contest]:
    return step_contests(ALGORITHM, request)
