"""What all groups over one process group share."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm import collectives
from zerokern.comm.group import Group
from zerokern.comm.observer import observer_of
from zerokern.comm.operations import Ledger

__all__ = ["Common", "CommonGroup", "detail"]


class Common:
    """What all groups over one process group and kind of device share: counts of operations, and the observer.

    It must not keep the process group alive, which is its key in a weak dictionary.
    """

    def __init__(self, pg: Any, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self.lane: Any = None
        self.ledger = Ledger(self.rank, self.size)
        self.ledger.publishing = lambda: any(group.publishing for group in list(self.groups.values()))
        process_group = weakref.ref(pg)

        def abort_transfers() -> None:
            living = process_group()
            if living is None:
                return
            if device.type == "cpu":
                collectives.abort_transfers(living, self.rank, self.size)
            else:
                collectives.abort(*(pg for pg in (living, self.lane) if pg is not None))

        def closed() -> list[int]:
            living = process_group()
            if living is None or device.type != "cpu":
                return []
            return collectives.closed_peers(living, self.rank, self.size)

        store = dist.HashStore()  # of its own until all are here
        self.observer = observer_of(self.ledger, store, timeout_s, abort_transfers, closed, polls=device.type != "cpu")


class CommonGroup(Group):
    """A group over a process group that reports its operations to the observer."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(common.rank, common.size, device, name)
        self._pg, self._common = pg, common

    def follow(self, key: str) -> None:
        self._common.observer.follow(key)

    def agree(self, key: str) -> None:
        self._common.observer.agree(key, self)

    def link_failures(self, other: Group) -> None:
        if isinstance(other, CommonGroup):
            self._common.observer.link_failures(other._common.observer)

    def fail(self, reason: str) -> None:
        self._common.observer.fail(reason)


def detail(tensor: Tensor) -> str:
    """Describes a tensor for messages.

    >>> detail(torch.ones(3))
    '3 elements of torch.float32'
    """
    return _described(tensor.numel(), tensor.dtype)


@functools.lru_cache(maxsize=1024)
def _described(numel: int, dtype: torch.dtype) -> str:
    return f"{numel} elements of {dtype}"
