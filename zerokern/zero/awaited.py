"""What a whole parameter is between a step and the moment its update is there: whoever reads or writes it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.zero.sharded import leaves
from zerokern.zero.sharded_functions import METADATA

__all__ = ["arrived", "awaited", "without_waiting"]

_ASKS_NO_VALUES = METADATA - {torch.Tensor.__format__, torch.Tensor.contiguous}


class Awaited(nn.Parameter):
    """The class of a parameter whose update is under way; its object, memory and graph are what they were.

    A plain parameter pays for none of this: it is of torch's own class before and after.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: Any = kwargs or {}
        found = () if func in _ASKS_NO_VALUES else [one for one in leaves((args, given)) if type(one) is Awaited]
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        for one in found:
            _wait(one)
        return func(*args, **given)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        _wait(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
        return nn.Parameter.__reduce_ex__(self, protocol)


def _wait(param: Tensor) -> None:
    home = param._zk_home  # type: ignore[attr-defined]
    home.sharding.publisher.arrive(home.gradients.number)
    arrived([param])


def awaited(params: Sequence[Tensor]) -> None:
    """From now on who asks one of these for its values waits until it has arrived."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = Awaited


def arrived(params: Sequence[Tensor]) -> None:
    """These are as they should be, or nobody will make them so."""
    for param in params:
        if type(param) is Awaited:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


def without_waiting() -> Any:
    """Within, parameters are looked at as they are."""
    return torch._C.DisableTorchFunctionSubclass()
