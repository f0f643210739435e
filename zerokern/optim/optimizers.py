"""The optimizers: Adam, AdamW, Lion, Adagrad and SGD differ in keywords, hyperparameters and moments, and in nothing
else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerokern.core.errors import got
from zerokern.core.units import MasterFormat, Schedule, StateFormat, Tier, Update
from zerokern.memory import TierConfig
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.formats import Algorithm
from zerokern.schedule import Delayed

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]


class Adam(FusedOptimizer):
    """Adam as torch defines it. Parameters and gradients may each be fp32, bf16 or fp16, in host memory or on one GPU.

    On a GPU a step launches kernels and waits for nothing. After one ordinary step it can be captured in a CUDA graph,
    alone or with forward and backward, under `zk.shard` too; give `lr` as a tensor on the GPU if it is to change.

    These keywords come on top of torch's:

    state_format: format of exp_avg and exp_avg_sq: "fp32" (exact), "bf16" or "int8". Also per param_group.
    master_format: how the fp32 value of a 16-bit parameter is kept. "split16": as a 16-bit remainder; together with the
        bf16 parameter it is the exact fp32 value. "split8": an 8-bit remainder, 24 bits in all. "fp32": a separate fp32
        copy. "none": not at all. Also per param_group. By default split16 for bf16 and fp32 for fp16; an fp32 parameter
        needs none. Writes to parameters are noticed; after one by way of `p.data` call `refresh_masters()`.
    max_grad_norm: clips the global gradient norm inside the update, and skips the step if the norm is not finite.
        `math.inf` measures the norm, as `opt.grad_norm`, and clips nothing.
    group: ranks that hold other parameters of the same model, such as the stages of a pipeline: `mesh["pp"]` or a
        ProcessGroup. They share one norm and one decision to step. Each rank has one optimizer for all that it holds.
    stochastic_seed: rounds stochastically where master_format is "none". The same seed gives bitwise identical results.
    tier: where the state is kept. "device": next to the parameters. "cpu": in pinned host memory, where the update runs
        too; for parameters on a GPU, gradients are copied down and parameters are copied up in their own dtypes.
        `zk.Nvme(path)`: in a folder on disk that belongs to this optimizer. The state streams through host memory at
        each step, with bitwise identical results. A list of tiers is filled one after the other, each up to its budget:
        `["device:8GiB", "cpu:64GiB", zk.Nvme(path)]`. The state of a parameter goes to the first one that has room for
        all of it, and parameters that a forward needs first choose first. What stays on the device is updated there.
    schedule: when the update runs. "sync": inside `step()`. "overlap": gradients of zk.shard leave during backward, and
        parameters come back one by one while the next forward waits only for those it needs. Results are bitwise
        identical. Call `flush()` before you read parameters in any other way. `zk.Delayed(after=N)`: after N exact
        steps each update runs beside the following forward and backward, and the next `step()` publishes it: one step
        late, which is another trajectory.
    update: where the update of state in tier="cpu" runs, for parameters on a GPU. "host": on the CPU. "device": on the
        GPU, through which the state streams from pinned host memory and back, piece by piece. Gradients and parameters
        stay there, and the host has no copies of them. It pays where the link is fast or the host is slow; results are
        bitwise identical. With schedule="overlap" and zk.shard each forward waits for its own parameters alone, and the
        state of later ones streams meanwhile. `zerokern bench offload --where` says which is faster on a machine. For
        parameters in host memory both are one.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = zk.Adam([weight], lr=0.1)
    >>> weight.grad = torch.tensor([1.0, -1.0]); opt.step(); weight.data
    tensor([0.9000, 1.1000])
    """

    _algorithm = Algorithm("adam", counts_steps=True)

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
        tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "host",
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
    schedule, update), mean what `zk.Adam` says.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> opt = zk.AdamW([weight], lr=0.5, weight_decay=0.5, max_grad_norm=1.0)
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
        tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "host",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super(Adam, self).__init__(params, {**locals(), "decoupled_weight_decay": True})


class Lion(FusedOptimizer):
    """Lion: each element moves by `lr` in the direction of the sign of an interpolated momentum.

    (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.) Weight decay is decoupled. It keeps one moment,
    half the state of Adam, and usually wants a learning rate three to ten times lower than AdamW's and a weight decay
    as much higher. `betas`: what the momentum weighs in the sign, and how it decays.

    state_format: "fp32" (exact), "bf16" or "int8" for exp_avg. master_format, max_grad_norm, group, stochastic_seed,
    tier, schedule and update: as `zk.Adam` says.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = zk.Lion([weight], lr=0.25)
    >>> weight.grad = torch.tensor([3.0, -0.1]); opt.step(); weight.data
    tensor([0.7500, 1.2500])
    """

    _algorithm = Algorithm("lion", counts_steps=False)

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
        tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "host",
        state_format: StateFormat = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())


class Adagrad(FusedOptimizer):
    """Adagrad: each element's learning rate falls with the sum of its squared gradients.

    As torch defines it, except that `sum` is made at the first step, from `initial_accumulator_value`.

    state_format: "fp32" (exact) or "bf16" for `sum`. master_format, max_grad_norm, group, stochastic_seed, tier,
    schedule and update: as `zk.Adam` says.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = zk.Adagrad([weight], lr=0.5)
    >>> weight.grad = torch.tensor([2.0, -2.0]); opt.step(); weight.data
    tensor([0.5000, 1.5000])
    """

    _algorithm = Algorithm("adagrad", counts_steps=True, begins_by="initial_accumulator_value")

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
        tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "host",
        state_format: Literal["fp32", "bf16"] = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())


def _refuse_nesterov(group: dict[str, Any]) -> None:
    momentum, dampening = group["momentum"], group["dampening"]
    if group["nesterov"] and (momentum == 0.0 or dampening != 0.0):
        do = "pass momentum > 0 and dampening=0"
        raise ValueError(got("nesterov", True, f"False with momentum={momentum:g}, dampening={dampening:g}", do))


class SGD(FusedOptimizer):
    """Stochastic gradient descent as torch defines it: with momentum, dampening and Nesterov's momentum if asked for.

    Without momentum there is no state but the master's. The first momentum_buffer is the gradient itself.

    state_format: "fp32" (exact) or "bf16" for momentum_buffer. master_format, max_grad_norm, group, stochastic_seed,
    tier, schedule and update: as `zk.Adam` says.

    >>> import torch, zerokern as zk
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> opt = zk.SGD([weight], lr=0.5, momentum=0.5)
    >>> for _ in range(2): weight.grad = torch.ones(2); opt.step()
    >>> weight.data
    tensor([-0.2500, -0.2500])
    """

    _algorithm = Algorithm("sgd", counts_steps=False, starts_from_gradient=True, refuse=_refuse_nesterov)

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
        tier: Tier | TierConfig | Sequence[str | TierConfig] = "device",
        schedule: Schedule | Delayed = "sync",
        update: Update = "host",
        state_format: Literal["fp32", "bf16"] = "fp32",
        master_format: MasterFormat | None = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        stochastic_seed: int | None = None,
    ) -> None:
        super().__init__(params, locals())
