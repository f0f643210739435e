"""torchtitan trains with zerokern: a TrainSpec whose optimizers are exchanged, and whose models zk.shard divides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

try:
    from torchtitan.components.optimizer import (
        FTOptimizersContainer,
        OptimizersContainer,
        OptimizersInBackwardContainer,
    )
    from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
except ImportError as error:
    raise ImportError(
        "zerokern.integrations.torchtitan stands on the TrainSpec of torchtitan 0.2, which later ones do not have; "
        "allowed: pip install 'torchtitan>=0.2.2,<0.3'"
    ) from error

import zerokern as zk
from zerokern.core.errors import StateError, got
from zerokern.integrations.torchtitan_shard import parallelized, pipelined
from zerokern.optim.base import FusedOptimizer
from zerokern.zero.partition import check_stage

__all__ = ["exchanged", "train_spec", "use"]

KINDS: dict[type, type[FusedOptimizer]] = {torch.optim.AdamW: zk.AdamW, torch.optim.Adam: zk.Adam}
KEPT = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}
OURS = {"tier", "schedule", "state_format", "master_format", "stochastic_seed"}
Options = Callable[[str, Tensor], dict[str, Any]]  # of one parameter, by its name in the model


def use(
    model: str,
    options: Options | None = None,
    *,
    stage: int | None = None,
    shard: Mapping[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Train this model of torchtitan with `zk.AdamW(**settings)`; all else of it and of the configuration stays.

    In a module of your own that torchtitan is told of by `--experimental.custom_import`: it imports it before it looks
    for the model. `options` says what is different for some parameters, such as those that are too small for int8.

    `stage`: `zk.shard` divides the model in the place of FSDP2 or DDP, along the dimensions that they would divide it
    along (`data_parallel_shard_degree` times `context_parallel_degree`; `data_parallel_replicate_degree` makes copies);
    tensor, context and pipeline parallelism, activation checkpointing and compile are torchtitan's. `shard` has more
    keywords of `zk.shard`: `{"tier": "cpu"}`. None: FSDP2 divides it.

    >>> def options(name, param):
    ...     return {} if param.ndim > 1 else {"state_format": "fp32", "weight_decay": 0.0}
    >>> use("llama3", options, stage=3, tier="cpu", state_format="int8")
    """
    register_train_spec(model, train_spec(get_train_spec(model), options, stage=stage, shard=shard, **settings))


def train_spec(
    spec: TrainSpec,
    options: Options | None = None,
    *,
    stage: int | None = None,
    shard: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TrainSpec:
    """That TrainSpec, with the optimizers that it builds exchanged; the hooks that it has put on them stay.

    `stage` and `shard`: as `use` has them.

    >>> spec = train_spec(get_train_spec("qwen3"), tier="cpu")
    >>> spec.model_cls.__name__
    'Qwen3Model'
    """
    unknown = sorted(set(settings) - OURS)
    if unknown:
        do = "The rate, betas, eps and weight decay come from torchtitan's [optimizer]; it clips by training.max_norm"
        raise TypeError(got("settings", ", ".join(unknown), ", ".join(sorted(OURS)), do))
    built: Callable[..., OptimizersContainer] = spec.build_optimizers_fn

    def build_optimizers(*arguments: Any, **keywords: Any) -> OptimizersContainer:
        return exchanged(built(*arguments, **keywords), options, **settings)

    changed: dict[str, Any] = {"build_optimizers_fn": build_optimizers}
    if stage is not None:
        changed["parallelize_fn"] = parallelized(spec.parallelize_fn, check_stage(stage), dict(shard or {}))
        if spec.pipelining_fn is not None:
            changed["pipelining_fn"] = pipelined(spec.pipelining_fn)
    elif shard:
        raise ValueError(got("shard", dict(shard), "None where zk.shard does not divide the model", "Say stage= too"))
    return dataclasses.replace(spec, **changed)


def exchanged(container: OptimizersContainer, options: Options | None = None, **settings: Any) -> OptimizersContainer:
    """The same container, with an optimizer of zerokern in place of each of torch's, before any of them has stepped.

    Step, clipping, schedulers, hooks and checkpoints are torchtitan's own and know the container only.

    >>> model = torch.nn.Linear(2, 1)
    >>> container = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})
    >>> [opt] = exchanged(container, tier="cpu")
    >>> type(opt).__name__, opt.tier, opt.param_groups[0]["weight_decay"]
    ('AdamW', 'cpu', 0.1)
    """
    if isinstance(container, OptimizersInBackwardContainer):
        do = "zk.AdamW(schedule='overlap') fetches gradients during backward, and still clips"
        raise ValueError(got("optimizer.early_step_in_backward", True, "False with zerokern", do))
    if isinstance(container, FTOptimizersContainer):
        raise ValueError(got("fault_tolerance.enable", True, "False with zerokern: torchft keeps copies of its own"))
    names = {param: name for part in container.model_parts for name, param in part.named_parameters()}
    container.optimizers = [_exchanged(one, names, options, settings) for one in container.optimizers]
    container._zk_shards = True  # it is an Optimizer itself, whose step is that of ours
    return container


def _exchanged(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], options: Options | None, settings: dict[str, Any]
) -> FusedOptimizer:
    kind = KINDS.get(type(optimizer))
    if kind is None:
        raise ValueError(got("optimizer.name", type(optimizer).__name__, "AdamW or Adam"))
    if optimizer.state:
        raise StateError(f"this {type(optimizer).__name__} has stepped; exchange it before, where it is built")
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kept = {name: value for name, value in group.items() if name in KEPT}
        parts: list[tuple[dict[str, Any], list[Tensor]]] = []
        for param in group["params"]:
            own = {} if options is None else options(names[param], param)
            alike = next((params for others, params in parts if others == own), None)
            if alike is None:
                parts.append((own, [param]))
            else:
                alike.append(param)
        groups += [{**kept, **own, "params": params} for own, params in parts]
    return kind(groups, **settings)
