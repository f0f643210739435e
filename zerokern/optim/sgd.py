"""Stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import got
from zerokern.io import Nvme
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed


def _refuse(group: dict[str, Any]) -> None:
    momentum, dampening = group["momentum"], group["dampening"]
    if group["nesterov"] and (momentum == 0.0 or dampening != 0.0):
        do = "pass momentum > 0 and dampening=0"
        raise ValueError(got("nesterov", True, f"False with momentum={momentum:g}, dampening={dampening:g}", do))


class SGD(FusedOptimizer):
    """SGD as torch defines it. Keywords beside torch's are those of `zerokern.optim.Adam`, without state_format="int8".

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
        tier: str | Nvme = "device",
        schedule: str | Delayed = "sync",
        state_format: str = "fp32",
        master_format: str | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())
