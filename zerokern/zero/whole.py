"""Full parameters for a while, in the objects that the user knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerokern.zero.homes import alias, home_of
from zerokern.zero.params import BucketMemory, Tenant
from zerokern.zero.placing import exchange_bodies
from zerokern.zero.sharded import Sharded

__all__ = ["whole"]


@contextmanager
def whole(params: Sequence[nn.Parameter], write: bool) -> Iterator[None]:
    """Sharded parameters among `params` have their full values within; `write` keeps this rank's span of them."""
    shardings = {id(home.sharding): home.sharding for home in map(home_of, params) if home is not None}
    for sharding in shardings.values():
        sharding.publisher.finish()
    asked = {id(param) for param in params if isinstance(param, Sharded)}
    bodies = [
        pair
        for sharding in shardings.values()
        for memory in sharding.memories
        for pair in _gather(memory, [tenant for tenant in memory.tenants if id(tenant.param) in asked])
    ]
    exchanged: list[tuple[Tenant, nn.Parameter]] = []
    try:
        for tenant, body in bodies:
            exchange_bodies(tenant.param, body, tenant.name)
            exchanged.append((tenant, body))
        yield
    finally:
        for tenant, body in exchanged:
            exchange_bodies(tenant.param, body, tenant.name)
            if body.grad is None or isinstance(body.grad, Sharded):
                tenant.param.grad = body.grad
    if write:
        _keep(params, bodies)


def _gather(memory: BucketMemory, tenants: Sequence[Tenant]) -> list[tuple[Tenant, nn.Parameter]]:
    """Full values in memory of their own, which lives for as long as anything refers to it."""
    if not tenants:
        return []
    full = torch.empty(memory.bucket.padded_numel, dtype=memory.dtype, device=memory.device)
    memory.group.all_gather(full, memory.shard).wait()
    return [(tenant, _body(tenant, alias(full, tenant.place.offset, tenant.shape))) for tenant in tenants]


def _body(tenant: Tenant, values: Tensor) -> nn.Parameter:
    body = nn.Parameter(values, requires_grad=tenant.param.requires_grad)
    body.__dict__.update(tenant.param.__dict__)
    body.grad_dtype = tenant.param.grad_dtype
    body.grad = tenant.param.grad
    return body


def _keep(params: Sequence[nn.Parameter], bodies: Sequence[tuple[Tenant, nn.Parameter]]) -> None:
    with torch.no_grad():
        for tenant, body in bodies:
            home = home_of(tenant.param)
            assert home is not None
            home.piece.copy_(body.reshape(-1)[home.start : home.start + home.numel])
    there = [param for param in params if not isinstance(param, Sharded)]
    torch.autograd.graph.increment_version(there)
