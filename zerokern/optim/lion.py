"""Lion: the sign of an interpolated momentum (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.units import MasterFormat, Schedule, StateFormat, Tier
from zerokern.memory import TierConfig
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed


class Lion(FusedOptimizer):
    """Lion: each element moves by `lr` in the direction of the sign of an interpolated momentum.

    Weight decay is decoupled. It keeps one moment, half the state of Adam, and usually wants a learning rate three to
    ten times lower than AdamW's and a weight decay as much higher. `betas`: what the momentum weighs in the sign, and
    how it decays.

    state_format: "fp32" (exact), "bf16" or "int8" for exp_avg. master_format, max_grad_norm, group, stochastic_seed,
    tier and schedule: as `zerokern.optim.Adam` says.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Lion([weight], lr=0.25)
    >>> weight.grad = torch.tensor([3.0, -0.1]); opt.step(); weight.data
    tensor([0.7500, 1.2500])
    """

    _algorithm = Algorithm(
        name="lion",
        moments=(("exp_avg", "exp_avg"),),
        state_formats=("fp32", "bf16", "int8"),
        counts_steps=False,
        settings=("lr", "betas", "weight_decay", "maximize"),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        tier: Tier | TierConfig = "device",
        schedule: Schedule | Delayed = "sync",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())
