"""Parameters into their places: the object that the user knows stays, what it consists of changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from zerokern.core.errors import ShardError
from zerokern.zero import hooks
from zerokern.zero.homes import Home, give_home
from zerokern.zero.params import BucketMemory, Gathered, Tenant, whole_like
from zerokern.zero.sharded import Sharded
from zerokern.zero.units import Owner

if TYPE_CHECKING:
    from zerokern.zero.sharding import Sharding

__all__ = ["exchange_bodies", "place"]


def place(
    sharding: Sharding, memory: BucketMemory, lost: dict[int, Tensor], owners: dict[int, list[Owner]]
) -> list[Home]:
    """Point the parameters of a filled bucket at it, at their shard of it where it is sharded; returns their homes."""
    mine = {piece.param: piece for piece in memory.bucket.pieces(memory.group.rank)}
    homes = []
    for tenant in memory.tenants:
        number, param = tenant.place.param, tenant.param
        if sharding.replicated:
            start, span = 0, memory.view(tenant).view(-1)
        else:
            piece = mine.get(number)
            start, span = (0, memory.piece(None)) if piece is None else (piece.start, memory.piece(piece))
        home = Home(tenant.name, param, start, span, sharding, lost.get(number))
        if sharding.stage >= 3:
            _forget_weak_references(owners[id(param)])
            _forget_graphs(owners[id(param)])
            _shard(tenant, memory, home)
        else:
            param.data = memory.view(tenant)
            give_home(param, home)
            home.seen_version = param._version
        if param.requires_grad:  # before the bucket is released: autograd looks at the memory once
            sharding.nodes[home.name] = hooks.accumulator(param if tenant.full is None else tenant.full)
            if tenant.full is not None:  # a Function can be given the parameter itself
                sharding.more_nodes.append(hooks.accumulator(param))
        homes.append(home)
    memory.release()
    return homes


def _forget_weak_references(owners: list[Owner]) -> None:
    """Recurrent modules have some, to notice what we tell them ourselves; an object's body is exchanged without any."""
    for owner in owners:
        if isinstance(owner.module, nn.RNNBase):
            owner.module._flat_weight_refs = [None] * len(owner.module._flat_weights_names)


def _forget_graphs(owners: list[Owner]) -> None:
    """What a hook makes of parameters before each forward (old weight_norm, pruning) is there before the first one."""
    for module in {id(owner.module): owner.module for owner in owners}.values():
        for attribute in hooks.made_anew(module):
            made = module.__dict__.get(attribute)
            if isinstance(made, Tensor) and made.grad_fn is not None:
                module.__dict__[attribute] = made.detach().requires_grad_()
                hooks.on_gradient(module.__dict__[attribute], partial(_refuse_early, attribute))


def _refuse_early(attribute: str, _: Tensor) -> NoReturn:
    raise ShardError(
        f"a gradient came to a module's {attribute!r}, which a hook makes of its parameters before each forward, and "
        "which was made before zk.shard: run the module's forward first, then compute with it"
    )


def _shard(tenant: Tenant, memory: BucketMemory, home: Home) -> None:
    param = tenant.param
    full = Gathered(memory.view(tenant), requires_grad=param.requires_grad)
    full.__dict__.update(param.__dict__)
    give_home(full, home)
    full.resting_for = param
    tenant.full = home.leaf = full
    hooks.share_hooks(param, full)
    local = home.piece.detach()
    body = Sharded(local, home.shape, home.start, name=home.name, group=memory.group)
    body.whole = partial(whole_like, memory.group, memory.bucket.shard_numel, tenant.place)
    body.requires_grad_(param.requires_grad)
    body.__dict__.update(param.__dict__)
    body._is_param = True
    give_home(body, home)
    exchange_bodies(param, body, home.name)


def exchange_bodies(param: Tensor, body: Tensor, name: str) -> None:
    """Two objects change what they consist of, so that everybody who holds `param` holds the new body."""
    try:
        torch.utils.swap_tensors(param, body)
    except RuntimeError as error:
        raise ShardError(
            f"{name!r} cannot be exchanged while something else holds it ({error}): drop losses and outputs of earlier "
            "forwards, and weak references to it, before"
        ) from error
