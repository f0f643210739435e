"""How gradients become one over all ranks: their mean or their sum, in spans or whole, with copies of the spans."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.kernels.casts import Squares
from zerokern.zero.landing import IntoHost

__all__ = ["Summing"]


class Summing:
    """Of one bucket. `whole`: it stays whole on each rank.

    `losses`: how many of them a mean is of, which are those of other ranks too where gradients come from them; None: it
    is a sum.

    >>> Summing(Group(0, 1, torch.device("cpu"), "alone"), None, whole=True).needed
    False
    """

    def __init__(self, group: Group, losses: int | None, *, whole: bool, landing: IntoHost | None = None) -> None:
        self._group, self._everyone = group, group.everyone
        self._whole, self._landing = whole, landing
        self._losses = losses or 1
        self._others = not self._everyone.alone
        self._op = "mean" if losses == self._everyone.size else "sum"
        self._divides = whole and losses is not None and self._op == "sum"  # itself, and not the transport
        self.needed = self._others or self._divides  # whether anything is to be done

    @property
    def counts_again(self) -> bool:
        """Whether the next reduction adds up over the ranks again, or divides, what this one has left."""
        return self.needed and self._whole and self._op == "sum"

    def share_out(self, spans: Iterable[Tensor]) -> None:
        """Leaves each rank its share of what is summed already: `counts_again` makes that whole."""
        for span in spans:
            span.mul_(self._losses / self._everyone.size)

    def begin(
        self, buffer: Tensor, out: Tensor, *, add: bool, scratch: Tensor | None, squares: Squares | None = None
    ) -> Handle | None:
        """The buffer is on its way, in place where it stays whole; None where there is nothing to wait for."""
        scale = 1.0 / self._losses
        if self._whole:
            if self._divides:
                buffer.mul_(scale)
            return self._everyone.all_reduce(buffer, self._op, scratch=scratch) if self._others else None
        reduce = (self._landing or self._group).reduce_scatter
        return reduce(buffer, out, scale=scale, add=add, scratch=scratch, squares=squares)

    def scratch_nbytes(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """What it receives into, where the transport does not add up itself: in its first round, and in its second."""
        first, second = (self._everyone if self._whole else self._group).scratch_numel(numel)
        return first * dtype.itemsize, second * dtype.itemsize
