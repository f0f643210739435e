"""The gradients that wait for the end of their bucket, into its buffer in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerokern.kernels import Flattener

__all__ = ["Flattening"]


class Flattening:
    """Of one bucket, whose parameters begin at `offsets`. The tables of the last list of tensors are kept.

    >>> buffer = torch.zeros(4)
    >>> Flattening([0, 2], torch.float32).run({1: torch.ones(2)}, buffer); buffer
    tensor([0., 0., 1., 1.])
    """

    def __init__(self, offsets: Sequence[int], dtype: torch.dtype) -> None:
        self._offsets, self._dtype = offsets, dtype
        self._kept: tuple[tuple, Flattener] | None = None

    def run(self, grads: Mapping[int, Tensor], buffer: Tensor) -> None:
        """These gradients, by the places of their parameters."""
        if not grads:
            return
        tensors = list(grads.values())
        key = (tuple(grads), tuple((one.shape, one.stride(), one.dtype) for one in tensors))
        if self._kept is None or self._kept[0] != key:
            offsets = [self._offsets[place] for place in grads]
            self._kept = key, Flattener(tensors, self._dtype, offsets=offsets)
        self._kept[1].flatten(tensors, buffer)
