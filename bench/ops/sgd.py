"""SGD with momentum, the full step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..contest import Contest, Request
from ..ours import step_contests
from ..step import Algorithm, Format

HYPER = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "step": 10}


def scalars(hyper: Mapping[str, float]) -> dict[str, float]:
    return {"lr": hyper["lr"]}


def update(
    param: torch.Tensor, grad: torch.Tensor, states: tuple[torch.Tensor, ...], scalar: Mapping[str, float]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    (momentum_buffer,) = states
    momentum_buffer = HYPER["momentum"] * momentum_buffer + (grad + HYPER["weight_decay"] * param)
    return param - scalar["lr"] * momentum_buffer, (momentum_buffer,)


ALGORITHM = Algorithm(
    name="sgd",
    states=("momentum_buffer",),
    hyper=HYPER,
    scalars=scalars,
    update=update,
    formats=(Format("split16", "fp32"), Format("split16", "bf16")),
    optimizer="SGD",
    public_hyper={key: HYPER[key] for key in ("lr", "momentum", "weight_decay")},
    initial={"momentum_buffer": lambda noise: noise * 0.1},
)


def contests(request: Request) -> list[Contest]:
    return step_contests(ALGORITHM, request)
