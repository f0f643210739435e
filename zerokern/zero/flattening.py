"""The gradients that have landed go into their bucket's buffer: in one launch, or in one native call."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerokern.kernels import Flattener, cpu
from zerokern.memory.addresses import GradientReader, gradient_reader

__all__ = ["Flattening"]

_NATIVE = {torch.float32, torch.bfloat16, torch.float16}
_is_contiguous, _is_neg = Tensor.is_contiguous, Tensor.is_neg
_dtype_of, _is_cpu = operator.attrgetter("dtype"), operator.attrgetter("is_cpu")


class Flattening:
    """Copies gradients of one bucket, whose parameters begin at `offsets`, into its buffer, or adds them.

    What the last list of gradients was like is kept, for most are like it.

    >>> buffer = torch.zeros(4)
    >>> flattening = Flattening([0, 2], [2, 2], torch.float32)
    >>> flattening.run({1: torch.ones(2)}, buffer); flattening.run({1: torch.ones(2)}, buffer, add=True); buffer
    tensor([0., 0., 2., 2.])
    """

    def __init__(self, offsets: Sequence[int], numels: Sequence[int], dtype: torch.dtype) -> None:
        self._offsets, self._numels, self._dtype = offsets, numels, dtype
        self._columns: tuple[tuple[int, ...], array[int], array[int]] | None = None
        self._launched: tuple[tuple, Flattener] | None = None
        self._reader: GradientReader | None = None
        self._grad_dtype = dtype

    def of_all(self, leaves: Sequence[Tensor], places: Sequence[int], buffer: Tensor) -> bool:
        """Copies the gradients of all leaves at these places, which are found natively; whether they are as usual.

        `leaves` and `places` are the same in every call.
        """
        if not buffer.is_cpu or not leaves or self._dtype not in _NATIVE:
            return False
        if self._reader is None:
            dtypes, grads = list(map(_dtype_of, leaves)), [leaf.grad for leaf in leaves]
            found = {grad.dtype for grad in grads if grad is not None}
            if len(found) != 1 or not _NATIVE.issuperset({*found, *dtypes}):
                return False
            self._grad_dtype, numels = found.pop(), [self._numels[place] for place in places]
            self._reader = gradient_reader(leaves, None, numels, dtypes, [self._grad_dtype] * len(leaves))
        addresses = None if self._reader is None else self._reader.read()
        if addresses is None:
            return False
        cpu.collect(buffer, addresses, *self._spans(tuple(places)), self._grad_dtype, add=False)
        return True

    def run(self, grads: Mapping[int, Tensor], buffer: Tensor, *, add: bool = False) -> None:
        """Copies these gradients, by the places of their parameters, or adds them."""
        if not grads:
            return
        tensors = list(grads.values())
        dtypes = {*map(_dtype_of, tensors)}
        native = len(dtypes) == 1 and _NATIVE.issuperset({*dtypes, self._dtype})
        if native and buffer.is_cpu and all(map(_is_cpu, tensors)):
            if not all(map(_is_contiguous, tensors)) or any(map(_is_neg, tensors)):
                tensors = [one.resolve_neg().contiguous() for one in tensors]
            addresses = array("Q", [one.data_ptr() for one in tensors])
            cpu.collect(buffer, addresses, *self._spans(tuple(grads)), dtypes.pop(), add)
            return
        if not add and not buffer.is_cpu:
            self._launch(grads, tensors, buffer)
            return
        for place, grad in grads.items():
            span = buffer.narrow(0, self._offsets[place], self._numels[place])
            span.add_(grad.reshape(-1)) if add else span.copy_(grad.reshape(-1))

    def _launch(self, grads: Mapping[int, Tensor], tensors: Sequence[Tensor], buffer: Tensor) -> None:
        key = (tuple(grads), tuple((one.shape, one.stride(), one.dtype) for one in tensors))
        if self._launched is None or self._launched[0] != key:
            offsets = [self._offsets[place] for place in grads]
            self._launched = key, Flattener(tensors, self._dtype, offsets=offsets)
        self._launched[1].flatten(tensors, buffer)

    def _spans(self, places: tuple[int, ...]) -> tuple[array[int], array[int]]:
        if self._columns is None or self._columns[0] != places:
            begins, numels = (array("q", [column[at] for at in places]) for column in (self._offsets, self._numels))
            self._columns = places, begins, numels
        return self._columns[1:]
