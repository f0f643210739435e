"""Maps over the tensors in nested lists, tuples, mappings and dataclasses: what functions take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Slot", "cast_floats", "fill_slots", "mapped", "take_tensors"]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Marks where tensor `number` was in a container."""

    number: int


def mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Returns the same containers with `change(one)` in place of each tensor, or of each instance of another `kind`.

    A container in which nothing changes is returned itself.

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
        return items if type(value) is dict else _copied_mapping(value, items)
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


def _copied_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Exchanges the values in a copy: a mapping of a class of its own, as Hugging Face's model outputs are."""
    copied: Any = copy.copy(value)
    for key, item in items.items():
        copied[key] = item
    return copied


def take_tensors(value: Any, *, leave: type | tuple[type, ...] = ()) -> tuple[Any, list[Tensor]]:
    """Returns the containers with a `Slot` in place of each tensor, and the tensors, each once.

    Instances of `leave` stay where they are.

    >>> import torch
    >>> x = torch.ones(1)
    >>> take_tensors({"a": [x, 3], "b": x})
    ({'a': [Slot(number=0), 3], 'b': Slot(number=0)}, [tensor([1.])])
    """
    tensors: list[Tensor] = []
    slots: dict[int, Slot] = {}

    def take(tensor: Tensor) -> Any:
        if isinstance(tensor, leave):
            return tensor
        if id(tensor) not in slots:
            slots[id(tensor)] = Slot(len(tensors))
            tensors.append(tensor)
        return slots[id(tensor)]

    return mapped(value, take), tensors


def fill_slots(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns the containers with these tensors in place of the slots.

    >>> fill_slots([Slot(0), 3], ["x"])
    ['x', 3]
    """
    return mapped(value, lambda slot: tensors[slot.number], Slot)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Returns the same containers with every floating-point tensor in them in `dtype`."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
