"""AdamW, the full step, in every format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..contest import Contest, Request
from ..ours import step_contests
from ..step import Algorithm, Format

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 1000}


def scalars(hyper: Mapping[str, float]) -> dict[str, float]:
    step = hyper["step"]
    return {
        "decay": 1 - hyper["lr"] * hyper["weight_decay"],
        "step_size": hyper["lr"] / (1 - hyper["beta1"] ** step),
        "unbias": (1 - hyper["beta2"] ** step) ** -0.5,
    }


def update(
    param: torch.Tensor, grad: torch.Tensor, states: tuple[torch.Tensor, ...], scalar: Mapping[str, float]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    exp_avg, exp_avg_sq = states
    exp_avg = exp_avg + (1 - HYPER["beta1"]) * (grad - exp_avg)
    exp_avg_sq = HYPER["beta2"] * exp_avg_sq + (1 - HYPER["beta2"]) * grad * grad
    denominator = torch.sqrt(exp_avg_sq) * scalar["unbias"] + HYPER["eps"]
    return param * scalar["decay"] - scalar["step_size"] * (exp_avg / denominator), (exp_avg, exp_avg_sq)


ALGORITHM = Algorithm(
    name="adam",
    states=("exp_avg", "exp_avg_sq"),
    hyper=HYPER,
    scalars=scalars,
    update=update,
    formats=(
        Format("split16", "fp32"),
        Format("fp32", "fp32"),
        Format("split16", "bf16"),
        Format("split16", "int8"),
        Format("split8", "int8"),
    ),
    optimizer="AdamW",
    public_hyper={
        "lr": HYPER["lr"],
        "betas": (HYPER["beta1"], HYPER["beta2"]),
        "eps": HYPER["eps"],
        "weight_decay": HYPER["weight_decay"],
    },
    initial={"exp_avg": lambda noise: noise * 0.01, "exp_avg_sq": lambda noise: (noise * 0.05).square() + 4e-4},
    decoupled=True,
)


def contests(request: Request) -> list[Contest]:
    return step_contests(ALGORITHM, request)
