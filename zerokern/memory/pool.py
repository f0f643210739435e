"""Device memory of its own for what comes and goes in a few sizes: it cannot leave holes in what activations use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["DevicePool"]


class DevicePool:
    """A pool of torch's allocator on a GPU; elsewhere the system's own allocator serves.

    >>> pool = DevicePool(torch.device("cpu"))
    >>> with pool.allocating():
    ...     torch.zeros(2)
    tensor([0., 0.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._pool = torch.cuda.MemPool()

    def allocating(self) -> AbstractContextManager[object]:
        """What this thread allocates within comes from the pool, and goes back to it."""
        return nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool, self.device)
