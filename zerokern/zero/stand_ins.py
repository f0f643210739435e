"""What computes in the place of sharded parameters that a function was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerokern.zero.sharded import Sharded

__all__ = ["exchanged", "ids", "is_leaf_of_its_own", "original"]


def ids(value: Any) -> set[int]:
    """Of all tensors within nested arguments, those that were detached as what they were detached of."""
    if isinstance(value, Tensor):
        return {id(original(value))}
    if isinstance(value, dict):
        return set().union(*map(ids, value.values())) if value else set()
    return set().union(*map(ids, value)) if isinstance(value, list | tuple) and value else set()


def is_leaf_of_its_own(value: Any) -> bool:
    """`p.detach().requires_grad_()`, whose gradients are none of the parameter's."""
    return isinstance(value, Sharded) and value.original is not None and value.requires_grad


def original(value: Tensor) -> Tensor:
    """What a sharded parameter was detached of, or the tensor itself."""
    return value if getattr(value, "original", None) is None else value.original  # type: ignore[attr-defined]


def exchanged(value: Any, tenants: Mapping[int, Any]) -> Any:
    """The same arguments, with the whole tensor for each sharded parameter; `tenants`: by its id."""
    if isinstance(value, Tensor):
        known = original(value)
        if not isinstance(known, Sharded):
            return value
        tenant = tenants.get(id(known))
        if tenant is None or tenant.full is None:
            return value
        # as a Function is given again what it has saved
        return tenant.full if value is known else tenant.full.detach()
    if isinstance(value, dict):
        return {key: exchanged(item, tenants) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(exchanged(item, tenants) for item in value))
    return type(value)(exchanged(item, tenants) for item in value) if isinstance(value, list | tuple) else value
