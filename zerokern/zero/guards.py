"""What would train on without the other ranks, and is refused: strange optimizers, and a model that has changed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerokern.core.errors import ShardError, StateError
from zerokern.zero import hooks
from zerokern.zero.homes import Home, home_of

if TYPE_CHECKING:
    from zerokern.zero.sharding import Sharding

__all__ = ["install", "refuse_changes"]


@functools.cache
def install() -> None:
    """Once for the process, when the first model is sharded."""
    hooks.on_optimizer_steps(before=_before, after=_after)


def _homes(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Home]]:
    everyone = ((param, home_of(param)) for group in optimizer.param_groups for param in group["params"])
    return [(param, home) for param, home in everyone if home is not None]


def _before(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_zk_shards", False):
        return
    homes = _homes(optimizer)
    for param, home in homes:
        if param is home.piece:
            home.local_gradient(param)
        elif not home.sharding.replicated:
            raise StateError(
                f"{type(optimizer).__name__} was given {home.name!r}, which is sharded at stage {home.sharding.stage}: "
                "it would update parts of it that are not this rank's. Use zk.AdamW (or Adam, Lion, Adagrad, SGD) on "
                f"model.parameters(), or give {type(optimizer).__name__} the parameters zk.shards(model)"
            )
    for sharding in {id(home.sharding): home.sharding for _, home in homes}.values():
        sharding.settle()


def _after(optimizer: torch.optim.Optimizer) -> None:
    written: dict[int, Sharding] = {}
    if not getattr(optimizer, "_zk_shards", False):
        for param, home in _homes(optimizer):
            if param is home.piece:
                written[id(home.sharding)] = home.sharding
    for sharding in written.values():
        sharding.publish()


def refuse_changes(sharding: Sharding) -> None:
    """Parameters that were added, exchanged, moved or unfrozen since the model was sharded."""
    known = sharding.tenants
    there = set()
    for name, module in sharding.module.named_modules():
        for attribute, param in module._parameters.items():
            tenant = known.get(id(param))
            if tenant is not None:
                there.add(tenant.name)
            elif param is not None and param.requires_grad:
                _refuse_stranger(f"{name}.{attribute}" if name else attribute, param)
    lost = [tenant.name for tenant in known.values() if tenant.name not in there]
    if lost:
        raise ShardError(
            f"{lost[0]!r} is no longer a parameter of the model, and is still in a bucket of zk.shard; build the "
            "model as it is to be, then shard it"
        )
    for memory in sharding.memories:
        for tenant in memory.tenants:
            if tenant.param.requires_grad and not memory.bucket.trainable:
                raise ShardError(
                    f"{tenant.name!r} was frozen when the model was sharded, and has no place for gradients; "
                    "shard it with requires_grad=True, and freeze it afterwards for as long as it is to be frozen"
                )
    if not sharding.addresses:
        return
    tenants = [tenant for memory in sharding.memories for tenant in memory.tenants]
    if [tenant.param.data_ptr() for tenant in tenants] != sharding.addresses:
        pairs = zip(tenants, sharding.addresses, strict=True)
        moved = next(tenant.name for tenant, address in pairs if tenant.param.data_ptr() != address)
        raise ShardError(
            f"the memory of {moved!r} was exchanged after zk.shard (by .data, .to(), .half() or resize_); allowed: "
            "writing into it (copy_, load_state_dict). Move and convert a model before it is sharded"
        )


def _refuse_stranger(name: str, param: nn.Parameter) -> None:
    raise ShardError(
        f"{name!r}, of shape {tuple(param.shape)}, is no parameter that the model had when it was sharded; write into "
        "the parameters that are there (zk.gathered(..., write=True)), or build the model anew and shard that"
    )
