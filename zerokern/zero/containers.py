"""The tensors in what a function is given and gives back: in lists, tuples, mappings and dataclasses, however deep."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["mapped"]


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """The same containers, with `change(one)` in the place of each tensor, or other `kind`; what has none is itself.

    >>> import torch
    >>> mapped({"a": [torch.ones(2), 3], "b": "text"}, lambda tensor: tensor.numel())
    {'a': [2, 3], 'b': 'text'}
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, change, kind) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, tuple | list):
        found = [mapped(item, change, kind) for item in value]
        if all(one is item for one, item in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        new = {name: mapped(item, change, kind) for name, item in old.items()}
        return value if all(new[name] is item for name, item in old.items()) else dataclasses.replace(value, **new)
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of a class of its own, as model outputs are: its values are exchanged in a copy."""
    rebuilt: Any = copy.copy(value)
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt
