"""Host memory that CUDA knows: an arena of ours, and what torch pins."""

from __future__ import annotations

import torch

from zerokern.memory import Arena

from .settings import Settings

PAGE = 4096


class HostMemory:
    """An arena for `nbytes` in `tensors` leases. On a GPU it is registered with CUDA before anything is taken."""

    def __init__(self, settings: Settings, nbytes: int, tensors: int) -> None:
        self._cuda = not settings.rehearse
        if self._cuda:
            torch.cuda.init()  # an arena is registered once CUDA is in use
        self.arena = Arena(nbytes + tensors * PAGE, poison=False)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.arena.lease(max(1, numel * dtype.itemsize), "bench").tensor(dtype, (numel,))

    def by_torch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same memory as torch pins it."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._cuda)

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.arena.close(force=True)
