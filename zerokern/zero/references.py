"""Who else refers to memory that gradients lie in."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.zero.kinds import is_divided, local_of

__all__ = ["References", "shares"]


class References:
    """How often gradients over one memory are referred to; counted when they are made, for nobody has them then.

    Both times they come in a list that is made for the call.

    >>> memory = torch.zeros(4)
    >>> shown = [memory[:2], memory[2:]]
    >>> references = References(memory, list(shown))
    >>> references.has_more(memory, list(shown))
    False
    >>> kept = shown[1]
    >>> references.has_more(memory, list(shown)), references.has_more(memory, shown[:1])
    (True, False)
    """

    def __init__(self, memory: Tensor, shown: Sequence[Tensor]) -> None:
        self._to_memory = _to_memory(memory)
        self._to_each = _to_tensors(shown) / max(len(shown), 1)

    def has_more(self, memory: Tensor, dropped: Sequence[Tensor], views: int = 0) -> bool:
        """Whether there are more now: to those of them that are `dropped`, or by other views than these."""
        return _to_memory(memory) > self._to_memory + views or _to_tensors(dropped) > self._to_each * len(dropped)


def _to_memory(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _to_tensors(tensors: Sequence[Tensor]) -> int:
    parts = [local_of(one) for one in tensors if is_divided(one)]
    return sum(map(sys.getrefcount, tensors)) + sum(map(sys.getrefcount, parts))


def shares(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors lie in one memory.

    >>> whole = torch.zeros(4)
    >>> shares(whole[1:], whole), shares(whole.clone(), whole)
    (True, False)
    """
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)
