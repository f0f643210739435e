"""What modules compute with at stage 3: leaves of autograd's, whole while their unit is, and else without memory.

While it has none, such a leaf stands for the parameter that the user knows. Of a DTensor parameter it is a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import ShardError
from zerokern.zero.kinds import Distributed, is_placed

__all__ = ["Gathered", "be_gathered", "be_resting", "leaf_over", "stands_for"]


class Gathered(nn.Parameter):
    """A parameter over gathered memory. Writes by way of `.data` count here, and assigning it writes in place."""

    resting_for: nn.Parameter  # what the user knows

    @property
    def data(self) -> Tensor:
        return self.detach()  # torch's own has a version of its own: what is written to it would be lost

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise ShardError(
                f"`.data =` would make a parameter {value.dtype} of shape {tuple(value.shape)} on {value.device}; "
                f"allowed: what it is, {self.dtype} of shape {tuple(self.shape)} on {self.device}. Convert a model "
                "before zk.shard"
            )
        with torch.no_grad():
            self.copy_(value)


class _Absent:
    """Functions that are given it get the parameter instead."""

    __slots__ = ()
    resting_for: nn.Parameter

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_awake(args), **_awake(dict(kwargs or {})))


class Resting(_Absent, Gathered):
    """What is `Gathered` while it has no memory; a module may have kept it."""


class RestingDTensor(_Absent, Distributed):
    """The same of a DTensor, which is of torch's own class while it is whole: others cost more in each call."""


_RESTING: dict[type, type] = {Gathered: Resting, Distributed: RestingDTensor}
_GATHERED: dict[type, type] = {rests: whole for whole, rests in _RESTING.items()}


def leaf_over(view: Tensor, param: nn.Parameter) -> Any:
    """What modules compute with in the place of a parameter, over gathered memory."""
    kind = nn.Parameter if is_placed(view) else Gathered
    leaf: Any = kind(view, requires_grad=param.requires_grad)
    leaf.__dict__.update(param.__dict__)
    leaf.resting_for = param
    return leaf


def be_gathered(leaves: Iterable[Tensor]) -> None:
    """From now on these are what they show."""
    for leaf in leaves:
        leaf.__class__ = _GATHERED.get(type(leaf), type(leaf))


def be_resting(leaves: Iterable[Tensor]) -> None:
    """From now on these stand for what the user knows."""
    for leaf in leaves:
        leaf.__class__ = _RESTING.get(type(leaf), type(leaf))


def stands_for(param: Tensor) -> nn.Parameter | None:
    """The parameter that the user knows in the place of this; None of what is none of these leaves.

    >>> stands_for(nn.Parameter(torch.ones(1))) is None
    True
    """
    return getattr(param, "resting_for", None)


def _awake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.resting_for if isinstance(value, _Absent) else value
    if isinstance(value, dict):
        return {key: _awake(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_awake, value))
    return type(value)(map(_awake, value)) if isinstance(value, list | tuple) else value
