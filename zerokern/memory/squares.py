"""Sums of squares that a device measures of what it sends to host memory: eight bytes a chunk go down beside it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.kernels.squares import ChunkSums
from zerokern.kernels.triton.upload import host_words
from zerokern.memory.staging import Ticket

__all__ = ["MeasuredThere", "SquaresBelow"]


class MeasuredThere(NamedTuple):
    """The sums of chunks on the device (`there`), and the host memory that they are copied to (`here`)."""

    chunks: ChunkSums
    there: Tensor
    here: Tensor

    def later(self, ticket: Ticket) -> Callable[[], array[float]]:
        """Returns a function that waits for the copy and returns the sum of each tensor. Any thread may call it.

        >>> from zerokern.memory.staging import stream_ticket
        >>> found = SquaresBelow([2], [torch.float32]).launch(None, [torch.ones(2)])
        >>> _ = found.here.copy_(found.there)
        >>> found.later(stream_ticket(found.here.device))()
        array('d', [2.0])
        """
        chunks, here = self.chunks, self.here

        @functools.cache
        def sums() -> array[float]:
            ticket.wait()
            return chunks.added(here)

        return sums


class SquaresBelow:
    """Measures lists of tensors on their device, where all lists have the same `numels` and `dtypes`.

    Its owner starts no launch before the sums of the last one have been read, or are of no interest any more.

    >>> squares = SquaresBelow([2, 1], [torch.float32] * 2)
    >>> squares.launch(None, [torch.ones(2), torch.ones(1)]).there
    tensor([2., 1.], dtype=torch.float64)
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self.key = (tuple(numels), tuple(dtypes))
        self._chunks = ChunkSums(numels, dtypes)
        self._here: Tensor | None = None

    def launch(self, driver: Any, tensors: Sequence[Tensor]) -> MeasuredThere:
        """Launches the measurement on the current stream. `driver`: of the device; None for host memory."""
        # new memory each time: the copy of the last sums may still read theirs
        there = torch.empty(self._chunks.count, dtype=torch.float64, device=tensors[0].device)
        if self._here is None:  # of torch's allocator: an arena has whole pages, and a bucket has a few of these words
            self._here = host_words(there)
        launch = getattr(driver, "launch", None)  # a played device has streams of its own
        if launch is None:
            self._chunks.measure(tensors, there)
        else:
            launch(functools.partial(self._chunks.measure, list(tensors), there))
        return MeasuredThere(self._chunks, there, self._here)
