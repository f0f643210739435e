"""What a whole parameter is between a step and the moment its update is there: whoever reads or writes it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.zero.kinds import Distributed, known_shard
from zerokern.zero.sharded import leaves
from zerokern.zero.sharded_functions import METADATA

__all__ = ["arrived", "awaited", "without_waiting"]

_ASKS_NO_VALUES = METADATA - {torch.Tensor.__format__, torch.Tensor.contiguous}


class _Waits:
    """Of a parameter whose update is under way; its object, memory and graph are what they were."""

    __slots__ = ()

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: Any = kwargs or {}
        found = () if func in _ASKS_NO_VALUES else [one for one in leaves((args, given)) if isinstance(one, _Waits)]
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        for one in found:
            _wait(one)
        return func(*args, **given)

    def __deepcopy__(self, memo: dict) -> Any:
        _wait(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait(self)
        return self.__reduce_ex__(protocol)


class Awaited(_Waits, nn.Parameter):
    """A plain parameter pays for none of this: it is of torch's own class before and after."""


class AwaitedDTensor(_Waits, Distributed):
    """A DTensor, likewise."""


_WAITS: dict[type, type] = {nn.Parameter: Awaited, Distributed: AwaitedDTensor}
_ARRIVED: dict[type, type] = {waits: there for there, waits in _WAITS.items()}


def _wait(param: Any) -> None:
    home = known_shard(param)
    if home is not None:
        home.sharding.publisher.arrive(home.gradients.number)
    arrived([param])


def awaited(params: Sequence[Tensor]) -> None:
    """From now on who asks one of these for its values waits until it has arrived."""
    for param in params:
        param.__class__ = _WAITS.get(type(param), type(param))


def arrived(params: Sequence[Tensor]) -> None:
    """These are as they should be, or nobody will make them so."""
    for param in params:
        if isinstance(param, _Waits):
            param.__class__ = _ARRIVED[type(param)]


def without_waiting() -> Any:
    """Within, parameters are looked at as they are."""
    return torch._C.DisableTorchFunctionSubclass()
