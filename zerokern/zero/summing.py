"""How gradients become one over all ranks: their mean or their sum, in spans or whole, with copies of the spans."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.zero.landing import IntoHost

__all__ = ["Summing"]


class Summing:
    """Of one bucket. `whole`: it stays whole on each rank.

    >>> Summing(Group(0, 1, torch.device("cpu"), "alone"), "sum", whole=True).needed
    False
    """

    def __init__(self, group: Group, op: str, *, whole: bool, landing: IntoHost | None = None) -> None:
        self._group, self._everyone = group, group.everyone
        self._op, self._whole, self._landing = op, whole, landing
        self.needed = not self._everyone.alone  # whether there is anybody else

    @property
    def counts_again(self) -> bool:
        """Whether the next reduction adds up over the ranks again what this one has left."""
        return self.needed and self._whole and self._op == "sum"

    def share_out(self, spans: Iterable[Tensor]) -> None:
        """Leaves each rank its share of what is summed already: `counts_again` makes that whole."""
        for span in spans:
            span.mul_(1.0 / self._everyone.size)

    def begin(self, buffer: Tensor, out: Tensor, *, add: bool, scratch: Tensor | None) -> Handle | None:
        """The buffer is on its way, in place where it stays whole; None where there is nothing to wait for."""
        if self._whole:
            return self._everyone.all_reduce(buffer, self._op, scratch=scratch) if self.needed else None
        scale = 1.0 / self._everyone.size if self._op == "mean" else 1.0
        reduce = (self._landing or self._group).reduce_scatter
        return reduce(buffer, out, scale=scale, add=add, scratch=scratch)

    def scratch_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """What it receives into, where the transport does not add up itself: in its first round, and in its second."""
        first, second = (self._everyone if self._whole else self._group).scratch_numel(numel)
        return first * dtype.itemsize, second * dtype.itemsize
