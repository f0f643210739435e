"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.units import MasterFormat, Schedule, StateFormat, Tier
from zerokern.io import Nvme
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed


class Adam(FusedOptimizer):
    """Adam as torch defines it, for parameters in fp32, bf16 or fp16, with gradients of any of these, in host memory or
    on one CUDA GPU. There a step launches and waits for nothing; it can go into a CUDA graph after one step outside,
    with `lr` as a tensor on the GPU if it is to change.

    Keywords beside torch's:

    state_format: "fp32" (exact), "bf16" or "int8" for exp_avg and exp_avg_sq; also per param_group.
    master_format: "split16" (a bf16 parameter and its 16-bit remainder are the exact fp32 value), "split8" (24 bits),
        "fp32" (a separate fp32 copy) or "none"; also per param_group. None means split16 for bf16 parameters and fp32
        for fp16 ones; an fp32 parameter is its own master. Writes to parameters are
        followed, those by `p.data` too; after others that torch does not count, call `refresh_masters()`.
    max_grad_norm: clips the global norm within the update, and skips a step whose norm is not finite. math.inf measures
        the norm, for `grad_norm`, and clips nothing.
    group: ranks with other parameters that decide with these: `mesh["pp"]`, or its ProcessGroup, makes one norm and one
        decision to step of all stages of a pipeline, where one optimizer has all that its rank has of the model.
    stochastic_seed: rounds stochastically where master_format is "none": same seed, same bits.
    tier: where the state rests. "device": where the parameters are. "cpu": in one exact-size, pinned piece of host
        memory, where it is updated too; of CUDA parameters, gradients come down and parameters go up in their own
        dtypes. `zk.Nvme(path)`: a folder on disk, private to this optimizer, through which the state passes at each
        step on its way to the same update, with the same bits.
    schedule: when the update runs. "sync": in order. "overlap": the same bits, gradients leaving during backward,
        parameters coming back one by one; under zk.shard forwards wait for their own, and `flush()` comes before
        reading parameters in other ways. `zk.Delayed(after=N)`: after N exact steps each update is published by the
        next `step()`, and runs beside the forward and backward between.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = Adam([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1.0, -1.0]); opt.step(); weight.data
    tensor([0.9000, 1.1000])
    """

    _algorithm = Algorithm(
        name="adam",
        moments=(("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")),
        state_formats=("fp32", "bf16", "int8"),
        counts_steps=True,
        settings=("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        tier: Tier | Nvme = "device",
        schedule: Schedule | Delayed = "sync",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())


class AdamW(Adam):
    """AdamW: Adam whose weight decay shrinks the parameter instead of entering the gradient.

    All keywords, also those beside torch's (state_format, master_format, max_grad_norm, group, stochastic_seed, tier,
    schedule), mean what `zerokern.optim.Adam` says.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = AdamW([weight], lr=0.5, weight_decay=0.5, max_grad_norm=1.0)
    >>> weight.grad = torch.zeros_like(weight); opt.step(); weight.data, opt.grad_norm
    (tensor([0.7500, 0.7500], dtype=torch.bfloat16), 0.0)
    """

    _algorithm = replace(Adam._algorithm, fixed=(("decoupled_weight_decay", True),))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        tier: Tier | Nvme = "device",
        schedule: Schedule | Delayed = "sync",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super(Adam, self).__init__(params, {**locals(), "decoupled_weight_decay": True})
