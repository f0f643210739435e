"""Remembers the version of a saved tensor without keeping its memory, to notice in-place writes before backward."""

from __future__ import annotations

import torch
from torch import Tensor

from zerokern.zero.kinds import without_memory

__all__ = ["CHANGED", "Version"]

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input of a "
    "recomputed function, of shape {shape}, is at version {found}; expected version {expected} instead. Write to it "
    "after backward(), or hand the function a copy"
)


class Version:
    """The version of a tensor at the time of construction.

    >>> x = torch.ones(2)
    >>> version = Version(x)
    >>> version.is_changed, x.add_(1), version.is_changed
    (False, tensor([2., 2.]), True)
    """

    def __init__(self, tensor: Tensor) -> None:
        self._counter = without_memory(tensor)
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether the tensor has been written to since."""
        return self._counter._version != self._version

    def check(self, shape: torch.Size) -> None:
        """Raises torch's error for saved tensors if the tensor has been written to since."""
        if self.is_changed:
            found = self._counter._version
            raise RuntimeError(CHANGED.format(shape=tuple(shape), found=found, expected=self._version))
