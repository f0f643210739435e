"""Adagrad."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.units import MasterFormat, Schedule, Tier
from zerokern.memory import TierConfig
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed


class Adagrad(FusedOptimizer):
    """Adagrad: each element's learning rate falls with the sum of its squared gradients.

    As torch defines it, except that `sum` is made at the first step, from `initial_accumulator_value`.

    state_format: "fp32" (exact) or "bf16" for `sum`. master_format, max_grad_norm, group, stochastic_seed, tier and
    schedule: as `zerokern.optim.Adam` says.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adagrad([weight], lr=0.5)
    >>> weight.grad = torch.tensor([2.0, -2.0]); opt.step(); weight.data
    tensor([0.5000, 1.5000])
    """

    _algorithm = Algorithm(
        name="adagrad",
        moments=(("sum", "exp_avg"),),
        state_formats=("fp32", "bf16"),
        counts_steps=True,
        settings=("lr", "lr_decay", "eps", "weight_decay", "maximize"),
        begins_by="initial_accumulator_value",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
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
