"""Lion, the full step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..contest import Contest, Request
from ..ours import step_contests
from ..step import Algorithm, Format

HYPER = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "step": 1}


def scalars(hyper: Mapping[str, float]) -> dict[str, float]:
    return {"decay": 1 - hyper["lr"] * hyper["weight_decay"], "lr": hyper["lr"]}


def update(
    param: torch.Tensor, grad: torch.Tensor, states: tuple[torch.Tensor, ...], scalar: Mapping[str, float]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    (exp_avg,) = states
    direction = torch.sign(exp_avg + (1 - HYPER["beta1"]) * (grad - exp_avg))
    exp_avg = exp_avg + (1 - HYPER["beta2"]) * (grad - exp_avg)
    return param * scalar["decay"] - scalar["lr"] * direction, (exp_avg,)


ALGORITHM = Algorithm(
    name="lion",
    states=("exp_avg",),
    hyper=HYPER,
    scalars=scalars,
    update=update,
    formats=(Format("split16", "fp32"), Format("split16", "bf16"), Format("split8", "int8")),
    optimizer="Lion",
    public_hyper={
        "lr": HYPER["lr"],
        "betas": (HYPER["beta1"], HYPER["beta2"]),
        "weight_decay": HYPER["weight_decay"],
    },
    initial={"exp_avg": lambda noise: noise * 0.01},
)


def contests(request: Request) -> list[Contest]:
    return step_contests(ALGORITHM, request)
