"""A part of a box on its way from a file into a tensor: bytes come in pieces, and go where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from zerokern.core.errors import StateError
from zerokern.saving.index import Box, TensorRow
from zerokern.saving.pieces import place, runs
from zerokern.saving.reading import Span
from zerokern.saving.staging import SLOT

__all__ = ["Landing"]

ROW = 8 * SLOT  # bytes: what lies between two rows that are shorter is read as well


class Landing:
    """One item of a load plan on its way: a part of one box of a file, and the tensor that it goes into."""

    def __init__(
        self, item: ReadItem, box: Box, row: TensorRow, planner: LoadPlanner, told: Callable[[int], object]
    ) -> None:
        self.item, self.box, self.planner, self.told = item, box, planner, told
        self.key = item.storage_index.fqn
        self.dtype: torch.dtype = getattr(torch, row.dtype)
        self.target: Tensor | None = None
        self._runs = list(runs(box.sizes, item.storage_offsets, item.lengths, ROW // self.dtype.itemsize))
        self.left = sum(numel for _, numel in self._runs)

    def spans(self) -> Iterator[Span]:
        """What to read of the file, and who takes it."""
        width = self.dtype.itemsize
        for first, numel in self._runs:
            yield self.box.offset + first * width, numel * width, self._taking(first)

    def _taking(self, first: int) -> Callable[[Tensor, int], None]:
        return lambda found, at: self._take(found.view(self.dtype), first + at // self.dtype.itemsize)

    def _take(self, found: Tensor, first: int) -> None:
        if self.target is None:
            self.target = self._resolved()
        place(found, first, self.box.sizes, self.item.storage_offsets, self.target)
        self.told(found.numel() * self.dtype.itemsize)
        self.left -= found.numel()
        if not self.left:
            self.end()

    def end(self) -> None:
        """All of it is there."""
        target, self.target = self.target, None  # the planner's memory may be lent for a while only
        if target is None:
            target = self._resolved()
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)
        self.planner.commit_tensor(self.item, target)

    def _resolved(self) -> Tensor:
        target = self.planner.resolve_tensor(self.item).detach()
        if target.dtype is not self.dtype:
            raise StateError(
                f"{self.key} was saved as {self.dtype} and is to be read into {target.dtype}: bytes are "
                "read as they are, and converted by zk.load alone, which knows the formats"
            )
        if target.shape != self.item.lengths:
            raise StateError(
                f"{self.key}: a part of {tuple(self.item.lengths)} is to be read into a tensor of {tuple(target.shape)}"
            )
        return target
