"""Counts who else refers to the memory that gradients lie in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from zerokern.zero.kinds import is_divided, local_of

__all__ = ["References", "shares"]


class References:
    """Counts the references to gradients over one memory when they are made, for nobody else has them then.

    >>> memory = torch.zeros(4)
    >>> shown = [memory[:2], memory[2:]]
    >>> references = References(memory, shown)
    >>> references.has_more(memory, set())
    False
    >>> kept = shown[1]
    >>> references.has_more(memory, set()), references.has_more(memory, {1})
    (True, False)
    """

    def __init__(self, memory: Tensor, shown: Sequence[Tensor]) -> None:
        self._shown = list(shown)
        self._parts = [local_of(one) if is_divided(one) else None for one in shown]
        self._whole = [one for one in self._parts if one is not None]
        self._to_memory = _to_memory(memory)
        self._to_all = _to_tensors(self._shown) + _to_tensors(self._whole)

    def has_more(self, memory: Tensor, live: AbstractSet[int], views: int = 0) -> bool:
        """Whether there are more now: to those that are not `live`, by place, or by other views than these."""
        if _to_memory(memory) > self._to_memory + views:
            return True
        if not live:
            return _to_tensors(self._shown) + _to_tensors(self._whole) > self._to_all
        places = [place for place in range(len(self._shown)) if place not in live]
        some = [self._shown[place] for place in places]
        parts = [part for place in places if (part := self._parts[place]) is not None]
        each = self._to_all / max(len(self._shown), 1)
        return _to_tensors(some) + _to_tensors(parts) - len(some) - len(parts) > each * len(some)


def _to_memory(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _to_tensors(tensors: Sequence[Tensor]) -> int:
    return sum(map(sys.getrefcount, tensors))


def shares(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors lie in one memory.

    >>> whole = torch.zeros(4)
    >>> shares(whole[1:], whole), shares(whole.clone(), whole)
    (True, False)
    """
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)
