"""torch's functions by what they ask of a sharded tensor: nothing of its values, its span alone, or to write; and what
rests elsewhere, fetched for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = [
    "FREEZING",
    "GET_DATA",
    "METADATA",
    "SET_DATA",
    "UNFETCHED_CALLS",
    "UNTRACED",
    "WRITING_OPERATORS",
    "leaves",
    "targets",
]


def getters(*excluded: str) -> set[Callable]:
    described = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
    found = {one for name, one in described.items() if hasattr(type(one), "__set__") and name not in excluded}
    return {one.__get__ for one in found} | {one.__set__ for one in found}


def methods(names: str) -> set[Callable]:
    return {getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)}


GET_DATA, SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
METADATA = getters("data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__") | methods(
    "size dim ndimension numel nelement stride storage_offset element_size get_device __len__ __hash__ "
    "is_floating_point is_complex is_signed is_contiguous is_conj is_neg is_inference is_same_size is_set_to is_shared "
    "requires_grad_ retain_grad detach_ contiguous __format__ __dir__ has_names"
)
FREEZING = {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}  # type: ignore[attr-defined]
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
UNTRACED = {GET_DATA} | methods("detach clone new_empty new_zeros new_ones new_full new_tensor new_empty_strided")
UNTRACED |= {torch.clone, torch.detach, torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
UNFETCHED_CALLS = {torch.detach, torch.Tensor.detach, torch._amp_foreach_non_finite_check_and_unscale_}
"""What reads no values of what rests elsewhere, or fetches them itself"""
WRITING_OPERATORS = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ "
    "__ixor__ __ilshift__ __irshift__".split()
)


def leaves(arguments: Any) -> Iterable[Any]:
    """Everything within nested tuples, lists and dicts."""
    for one in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(one, (tuple, list, dict)):
            yield from leaves(one)
        else:
            yield one


def targets(func: Callable, args: tuple, kwargs: dict) -> list[Any]:
    """What the call writes to."""
    name = getattr(func, "__name__", "")
    found = [kwargs["out"]] if "out" in kwargs else []
    if name in WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        found += [args[0]] if args else list(kwargs.values())[:1]
    return list(leaves(found))
