"""Whether tensors still lie where they lay, all of them looked at in one native call."""

from __future__ import annotations

import ctypes
import operator
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.core import native
from zerokern.optim.gradients import torch_calls

__all__ = ["Whereabouts"]

_tensor_of = operator.attrgetter("_cdata")
_pointer_of = torch.Tensor.data_ptr


class Whereabouts:
    """Tensors and where they lie at first. Memory that is exchanged (`.data =`) leaves no other trace.

    >>> moment = torch.zeros(3); known = Whereabouts([moment]); known.unchanged()
    True
    >>> moment.data = torch.ones(3); known.unchanged()
    False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = array("Q", map(_pointer_of, tensors))
        calls = torch_calls()
        self._calls = None if calls is None else ctypes.byref(calls[0])
        if calls is not None:
            self._bodies = array("Q", map(_tensor_of, tensors))
            # torch.utils.swap_tensors, which would let another tensor free a body, refuses what has a weak reference
            self._kept = list(map(weakref.ref, tensors))
            self._look = native.library().zk_in_place

    def unchanged(self) -> bool:
        """Whether every one of them lies there still."""
        count = len(self._tensors)
        if self._calls is None:
            return array("Q", map(_pointer_of, self._tensors)) == self._addresses
        bodies, addresses = self._bodies.buffer_info()[0], self._addresses.buffer_info()[0]
        return bool(self._look(self._calls, bodies, addresses, count) == count)
