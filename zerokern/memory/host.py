"""Host memory for tensors that stay: one arena of exactly the planned bytes, cut into zeroed tensors.

State and twins of parameters that rest on the host lie here for as long as an optimizer lives. What they take is known
before (``memory/layout.py``), so that a plan and what the system counts agree to the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.memory.arena import Arena
from zerokern.memory.layout import nbytes_of, offsets_of
from zerokern.memory.room import refuse_beyond

__all__ = ["HostMemory"]


class HostMemory:
    """Zeroed tensors in one arena, in the order in which they were asked for, each with a storage of its own size.

    Its own size, because saving a tensor saves its storage. A tensor keeps the memory mapped, whoever drops this
    object; it stays registered with CUDA for as long as this object lives. More than fits is refused before anything
    is taken. A forked child has none of the memory: there ``check`` raises, where touching a tensor would crash.

    >>> memory = HostMemory([((3, 5), torch.float32), ((7,), torch.bfloat16)], "AdamW")
    >>> [tensor.shape for tensor in memory.tensors], memory.nbytes
    ([torch.Size([3, 5]), torch.Size([7])], 4096)
    """

    def __init__(self, wanted: Sequence[tuple[Sequence[int], torch.dtype]], owner: str) -> None:
        self.owner = owner
        self.nbytes = nbytes_of(wanted)
        self._arena: Arena | None = None
        self.tensors: list[Tensor] = []
        if not self.nbytes:
            self.tensors = [torch.zeros(tuple(shape), dtype=dtype, device="cpu") for shape, dtype in wanted]
            return
        refuse_beyond(self.nbytes, f"host memory for {owner}")
        self._arena = Arena(self.nbytes)
        lease = self._arena.lease(self.nbytes, owner)
        if self._arena.poison:
            lease.tensor().zero_()
        offsets, _ = offsets_of(math.prod(shape) * dtype.itemsize for shape, dtype in wanted)
        self.tensors = [
            lease.tensor(dtype, shape, offset) for offset, (shape, dtype) in zip(offsets, wanted, strict=True)
        ]

    @property
    def locked(self) -> bool:
        """Whether the system keeps every page resident; it may refuse (RLIMIT_MEMLOCK), which is logged once."""
        return self._arena is None or self._arena.locked

    @property
    def pinned(self) -> bool:
        """Whether CUDA knows the memory: it is told where CUDA is in use when the memory is taken."""
        return self._arena is not None and self._arena.pinned

    def check(self) -> None:
        """Raises in a forked child, which has no such memory.

        >>> HostMemory([((3,), torch.float32)], "example").check()
        """
        if self._arena is not None:
            self._arena.check()
