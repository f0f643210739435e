"""The gradients that wait for the end of their bucket, into its buffer in one launch, or in one native call."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerokern.kernels import Flattener, cpu

__all__ = ["Flattening"]

_NATIVE = {torch.float32, torch.bfloat16, torch.float16}
_pointer_of, _is_contiguous, _is_neg = Tensor.data_ptr, Tensor.is_contiguous, Tensor.is_neg
_dtype_of = operator.attrgetter("dtype")
_is_cpu = operator.attrgetter("is_cpu")


class Flattening:
    """Of one bucket, whose parameters begin at `offsets`. The tables of the last list of tensors are kept.

    >>> buffer = torch.zeros(4)
    >>> flattening = Flattening([0, 2], [2, 2], torch.float32)
    >>> flattening.run({1: torch.ones(2)}, buffer); flattening.run({1: torch.ones(2)}, buffer, add=True); buffer
    tensor([0., 0., 2., 2.])
    """

    def __init__(self, offsets: Sequence[int], numels: Sequence[int], dtype: torch.dtype) -> None:
        self._offsets, self._numels, self._dtype = offsets, numels, dtype
        self._columns: tuple[tuple[int, ...], array[int], array[int]] | None = None
        self._kept: tuple[tuple, Flattener] | None = None

    def run(self, grads: Mapping[int, Tensor], buffer: Tensor, *, add: bool = False) -> None:
        """Copies these gradients, by the places of their parameters, into the buffer, or adds them."""
        if not grads:
            return
        if buffer.is_cpu:
            self._collect(grads, buffer, add)
            return
        if add:
            for place, grad in grads.items():
                self._span(place, buffer).add_(grad.reshape(-1))
            return
        tensors = list(grads.values())
        key = (tuple(grads), tuple((one.shape, one.stride(), one.dtype) for one in tensors))
        if self._kept is None or self._kept[0] != key:
            offsets = [self._offsets[place] for place in grads]
            self._kept = key, Flattener(tensors, self._dtype, offsets=offsets)
        self._kept[1].flatten(tensors, buffer)

    def _collect(self, grads: Mapping[int, Tensor], buffer: Tensor, add: bool) -> None:
        tensors = list(grads.values())
        dtypes = {*map(_dtype_of, tensors)}
        if len(dtypes) > 1 or not _NATIVE.issuperset({*dtypes, self._dtype}) or not all(map(_is_cpu, tensors)):
            for place, grad in grads.items():
                span = self._span(place, buffer)
                span.add_(grad.reshape(-1)) if add else span.copy_(grad.reshape(-1))
            return
        if not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)):
            tensors = [one.resolve_neg().contiguous() for one in tensors]
        places = tuple(grads)
        if self._columns is None or self._columns[0] != places:
            begins, numels = (array("q", [column[at] for at in places]) for column in (self._offsets, self._numels))
            self._columns = places, begins, numels
        cpu.collect(buffer, array("Q", map(_pointer_of, tensors)), *self._columns[1:], dtypes.pop(), add)

    def _span(self, place: int, buffer: Tensor) -> Tensor:
        return buffer.narrow(0, self._offsets[place], self._numels[place])
