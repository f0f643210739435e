"""The gradient of a span that `zk.shards` returned: a plain tensor, but for what is asked of the whole gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import during
from zerokern.zero.sharded_refusals import ShardedUseError, advice_for

__all__ = ["SpanGradient", "found_by_any"]

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
_NORM = (
    "{op} would take the norm of this rank's part of the gradient of {name!r} for that of the whole; "
    "zk.clip_grad_norm_(model, max_norm) clips by the norm over all ranks and returns it. For the norm of the part: "
    "grad.detach().norm()"
)


class SpanGradient(Tensor):
    """torch's clipping is refused, for ranks would clip by different norms; what its GradScaler finds counts on all."""

    name: str = ""  # over torch's own property, which cannot be set
    group: Any = None

    @classmethod
    def of(cls, span: Tensor, name: str, group: Any) -> Tensor:
        """The same object, which knows from now on whose part it is, where there are others. None: each has it all."""
        if group is not None and group.size > 1 and type(span) is Tensor:
            span.__class__ = cls
            named: Any = span
            named.name, named.group = name, group
        return span

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            asked = next(_among(args), None) if "norm" in name else None
            if asked is not None and advice_for(name, random=False) == "norm":
                raise ShardedUseError(_NORM.format(op=name, name=asked.name))
            result = func(*args, **(kwargs or {}))
            for group in {one.group for one in _among(args[:1])} if func is _UNSCALE else ():
                found_by_any(group, args[1])
            return result

    def __deepcopy__(self, memo: dict) -> Tensor:
        """What is copied, or pickled, is nobody's part."""
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def found_by_any(group: Any, found: Tensor) -> None:
    """What a GradScaler found non-finite on one rank counts on all, wherever gradients lie."""
    with during("GradScaler.unscale_", of="GradScaler.unscale_"):
        there = found.to(group.device)
        group.all_reduce(there, "max").wait()
        if there is not found:
            found.copy_(there)


def _among(values: Iterable[Any]) -> Iterator[SpanGradient]:
    lists = (one if isinstance(one, (list, tuple)) else (one,) for one in values)
    return (one for many in lists for one in many if isinstance(one, SpanGradient))
