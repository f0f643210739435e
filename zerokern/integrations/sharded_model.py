"""Checks of a model that `zk.shard` has sharded, before a framework wraps it, moves it or steps it; and of options of
ours that came through a framework's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerokern.api import sharding_of
from zerokern.core.errors import StateError, got
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.chained import unchained
from zerokern.zero.shard import shard_of

__all__ = ["check_model", "check_optimizer", "check_settings", "is_ours", "is_sharded", "trains"]

OURS = {"tier", "schedule", "update", "state_format", "master_format", "stochastic_seed"}

ALLOWED = ("NO", "MULTI_CPU", "MULTI_GPU")  # where Accelerate lets each rank run the model by itself


def is_sharded(model: nn.Module) -> bool:
    """Returns whether `zk.shard` has sharded the model, or what it wraps.

    >>> import zerokern as zk
    >>> is_sharded(nn.Linear(2, 1)), is_sharded(zk.shard(nn.Linear(2, 1)))
    (False, True)
    """
    return any(shard_of(param) is not None for param in model.parameters())


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer, also within Accelerate's, is one of zerokern, or a chain of them.

    >>> import zerokern as zk
    >>> params = nn.Linear(2, 1).parameters()
    >>> is_ours(zk.ChainedOptimizer([zk.SGD(params)])), is_ours(torch.optim.SGD(nn.Linear(2, 1).parameters()))
    (True, False)
    """
    return all(isinstance(one, FusedOptimizer) for one in unchained(optimizer))


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Returns whether the optimizer has parameters of this sharded model.

    >>> import zerokern as zk
    >>> model, other = zk.shard(nn.Linear(2, 1)), zk.shard(nn.Linear(2, 1))
    >>> opt = zk.SGD(model.parameters())
    >>> trains(opt, model), trains(opt, other)
    (True, False)
    """
    homes = (shard_of(param) for group in optimizer.param_groups for param in group["params"])
    return any(home is not None and home.sharding is sharding_of(model) for home in homes)


def check_model(model: nn.Module, accelerator: Any) -> None:
    """Raises where Accelerate would wrap the model once more, train each rank apart, or compute in another dtype."""
    group, device = sharding_of(model).group, accelerator.device
    kind, backend = accelerator.distributed_type.value, accelerator.state.dynamo_plugin.backend.value
    precision, has_no_scaler = accelerator.mixed_precision, accelerator.scaler is None
    if kind not in ALLOWED:
        do = "zk.shard is what shards the model; leave FSDP, DeepSpeed and the like out of the configuration"
        raise ValueError(got("distributed_type", kind, " or ".join(ALLOWED), do))
    if group.size != accelerator.num_processes:
        do = "Call zk.shard, without a mesh, after the Accelerator (or TrainingArguments) has started the process group"
        wanted = f"{accelerator.num_processes}, as Accelerate has"
        raise ValueError(got("the number of ranks of zk.shard", group.size, wanted, do))
    if group.device.type != device.type:
        do = "Move the model to accelerator.device before zk.shard"
        raise ValueError(got("the device of the model", str(group.device), str(device), do))
    if backend != "NO":
        do = "Compile the units in place before zk.shard: for block in model.blocks: block.compile()"
        raise ValueError(got("dynamo_plugin", backend, "none", do))
    if precision == "fp8" or (precision == "fp16" and has_no_scaler):
        do = "fp16 needs a GradScaler, and Accelerate makes none for a CPU: it would train in fp32"
        raise ValueError(got("mixed_precision", precision, f"'no' or 'bf16' on {device}", do))


def check_optimizer(optimizer: torch.optim.Optimizer, scaled: bool) -> None:
    """Raises for an optimizer that would update, or judge by its own part alone, what is sharded."""
    pairs = [(param, shard_of(param)) for group in optimizer.param_groups for param in group["params"]]
    divided = [(param, home) for param, home in pairs if home is not None and not home.sharding.replicated]
    strangers = [home for param, home in divided if scaled or param is not home.piece]
    if strangers and not getattr(optimizer, "_zk_shards", False):
        what = f"{type(optimizer).__name__} for {strangers[0].name!r}, which zk.shard has sharded"
        raise StateError(got("optimizer", what, "zk.AdamW, Adam, Lion, Adagrad, SGD or Muon on its parameters"))


def check_settings(settings: Mapping[str, Any], do: str) -> None:
    """Raises for an option of our optimizers that the framework has in its own configuration, and for unknown ones.

    >>> check_settings({"tier": "cpu"}, "")
    >>> check_settings({"lr": 1e-3}, "The rate is learning_rate.")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    TypeError: settings='lr': must be master_format, schedule, state_format,... The rate is learning_rate.
    """
    unknown = sorted(set(settings) - OURS)
    if unknown:
        raise TypeError(got("settings", ", ".join(unknown), ", ".join(sorted(OURS)), do))
