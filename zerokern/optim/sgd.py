"""Stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import got
from zerokern.core.units import MasterFormat, Schedule, Tier
from zerokern.memory import TierConfig
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed


def _refuse(group: dict[str, Any]) -> None:
    momentum, dampening = group["momentum"], group["dampening"]
    if group["nesterov"] and (momentum == 0.0 or dampening != 0.0):
        do = "pass momentum > 0 and dampening=0"
        raise ValueError(got("nesterov", True, f"False with momentum={momentum:g}, dampening={dampening:g}", do))


class SGD(FusedOptimizer):
    """Stochastic gradient descent as torch defines it: with momentum, dampening and Nesterov's momentum if asked for.

    Without momentum there is no state but the master's. The first momentum_buffer is the gradient itself.

    state_format: "fp32" (exact) or "bf16" for momentum_buffer. master_format, max_grad_norm, group, stochastic_seed,
    tier and schedule: as `zerokern.optim.Adam` says.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = SGD([weight], lr=0.5, momentum=0.5)
    >>> for _ in range(2): weight.grad = torch.ones(2); opt.step()
    >>> weight.data
    tensor([-0.2500, -0.2500])
    """

    _algorithm = Algorithm(
        name="sgd",
        moments=(("momentum_buffer", "exp_avg"),),
        state_formats=("fp32", "bf16"),
        counts_steps=False,
        starts_from_gradient=True,
        settings=("momentum", "dampening", "nesterov", "lr", "weight_decay", "maximize"),
        moments_by="momentum",
        refuse=_refuse,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        tier: Tier | TierConfig = "device",
        schedule: Schedule | Delayed = "sync",
        state_format: Literal["fp32", "bf16"] = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())
