"""Gives back the device memory of reduced gradients whose values lie in host memory, until somebody uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.memory.tier import DevicePool
from zerokern.zero.reducing import storage_references

__all__ = ["ReleasedMemory"]

Fetch = Callable[[Sequence[Tensor] | None], None]
"""Copies the values of all pieces back into them, before whoever is next on the current stream, or on the host; None:
they are not needed any more."""


class ReleasedMemory:
    """The memory of one bucket's reduced gradients, which is released while copies in host memory stand for it.

    The storage stays the same object, empty meanwhile, so that all views of it are right again once it has memory.

    >>> from types import SimpleNamespace
    >>> memory, reduced = ReleasedMemory(DevicePool(torch.device("cpu"))), torch.ones(4)
    >>> bucket = SimpleNamespace(reduced=reduced, pieces=[reduced[:2]], in_use=False, references=None)
    >>> bucket.references = SimpleNamespace(to_memory=9)
    >>> memory.release(bucket, lambda pieces: pieces[0].fill_(2.0)), reduced.untyped_storage().nbytes()
    (True, 0)
    >>> memory.restore(bucket); reduced
    tensor([2., 2., 0., 0.])
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._fetch: Fetch | None = None
        self._nbytes = 0
        self.used = False  # by the program, since the last pass began
        self.stays = False  # used after the pass before: to bring it back each time would cost more than it gives

    @property
    def is_released(self) -> bool:
        """Whether the gradients have no memory here."""
        return self._fetch is not None

    def begin(self, bucket: Any) -> None:
        """A pass is about to collect gradients here, added to what `.grad` shows."""
        self.stays, self.used = self.used, False
        if self.is_released:
            self._allocate(bucket, fetch=bool(bucket.kept_gradients()))

    def release(self, bucket: Any, fetch: Fetch, *, more: int = 0) -> bool:
        """Frees the memory, unless it is in use or somebody has views of it; returns whether it did.

        `fetch` is called once somebody needs the values again, with the pieces to fill. `more`: references to it by
        copies under way, which the current stream waits for.
        """
        if self.is_released or bucket.in_use:
            return False
        storage = bucket.reduced.untyped_storage()
        if storage_references(bucket.reduced) > bucket.references.to_memory + more or not storage.resizable():
            return False
        self._nbytes, self._fetch = storage.nbytes(), fetch
        storage.resize_(0)
        return True

    def restore(self, bucket: Any, *, unseen: bool = False) -> None:
        """Allocates the memory anew, if it was released, and fetches the values.

        `unseen`: not if no parameter shows any of them, which will have zeros if they are asked for nevertheless.
        """
        if self.is_released and unseen and not bucket.kept_gradients():
            get, self._fetch = self._fetch, _forgotten
            if get is not None:
                get(None)
        elif self.is_released:
            self._allocate(bucket, fetch=True)

    def _allocate(self, bucket: Any, *, fetch: bool) -> None:
        storage = bucket.reduced.untyped_storage()
        with self._pool.lasting():
            storage.resize_(self._nbytes)
        get, self._fetch = self._fetch, None  # last: without memory for them they are where they were
        if fetch:  # else a pass writes all of it: what was given, and zeros where nothing was
            torch.empty(0, dtype=torch.uint8, device=bucket.reduced.device).set_(storage).zero_()
        if get is not None:
            get(bucket.pieces if fetch else None)


def _forgotten(pieces: Sequence[Tensor] | None) -> None:
    pass
