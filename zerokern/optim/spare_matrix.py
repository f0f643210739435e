"""Memory for matrices while they are orthogonalized (Muon)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zerokern.kernels.reference import SUMSQ_CHUNK

__all__ = ["SpareMatrix"]

_HOST = torch.device("cpu")


class SpareMatrix:
    """Memory for the one matrix that is orthogonalized, or for rounds, on a device as long as whoever holds it.

    In host memory it is there during an update alone; a device's addresses have to stay, for they have been sent there.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._memory = self._sums = torch.empty(0)
        self._stays = False

    @contextmanager
    def lent(self, numel: int, nbytes: int) -> Iterator[None]:
        """Has room for so many bytes, and for sums of squares of so many elements, within the block."""
        self._memory = self._grown(self._memory, nbytes, torch.uint8)
        self._sums = self._grown(self._sums, -(-numel // SUMSQ_CHUNK), torch.float64)
        self._stays = False
        try:
            yield
        finally:
            if not self._stays:
                self.free()

    def _grown(self, memory: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if memory.numel() >= numel:
            return memory
        more = torch.empty(numel, dtype=dtype, device=self.place)
        if self._stays:
            more[: memory.numel()] = memory
        return more

    @property
    def nbytes(self) -> int:
        """Bytes that it has now."""
        return self._memory.nbytes + self._sums.nbytes

    def stay(self) -> None:
        """Keeps what is in it past the end of the block, for the next one."""
        self._stays = True

    def free(self) -> None:
        """Frees host memory."""
        if self.place == _HOST:
            self._memory = self._sums = torch.empty(0)

    def memory(self, numel: int, dtype: torch.dtype, at: int = 0) -> Tensor:
        """Returns room for as many elements, whatever it holds, from this byte on."""
        return self._memory[at : at + numel * dtype.itemsize].view(dtype)

    def sums(self, numel: int) -> Tensor:
        """Returns room for the sums of squares of as many elements."""
        return self._sums[: -(-numel // SUMSQ_CHUNK)]
