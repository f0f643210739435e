"""What all groups of one process group share."""

from __future__ import annotations

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
    """What all groups of one process group share, on one kind of device: counts of what was begun, and the observer.

    It must not hold the process group, which is the key that it is found by.
    """

    def __init__(self, pg: Any, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self.lane: Any = None
        self.ledger = Ledger(self.rank, self.size)
        self.ledger.publishing = lambda: any(group.publishing for group in list(self.groups.values()))
        found = weakref.ref(pg)

        def sever() -> None:
            living = found()
            if living is None:
                return
            if device.type == "cpu":
                collectives.sever(living, self.rank, self.size)
            else:
                collectives.abort(*(one for one in (living, self.lane) if one is not None))

        def closed() -> list[int]:
            living = found()
            if living is None or device.type != "cpu":
                return []
            return collectives.closed_peers(living, self.rank, self.size)

        store = dist.HashStore()  # of its own until all are here
        self.observer = observer_of(self.ledger, store, timeout_s, sever, closed, polls=device.type != "cpu")


class CommonGroup(Group):
    """A group over a process group, whose observer is told of all that it does."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(common.rank, common.size, device, name)
        self._pg, self._common = pg, common

    def follow(self, key: str) -> None:
        self._common.observer.follow(key)

    def agree(self, key: str) -> None:
        self._common.observer.agree(key, self)

    def tie(self, other: Group) -> None:
        if isinstance(other, CommonGroup):
            self._common.observer.tie(other._common.observer)

    def give_up(self, reason: str) -> None:
        self._common.observer.give_up(reason)


def detail(tensor: Tensor) -> str:
    """What a message says of a tensor that is moved.

    >>> detail(torch.ones(3))
    '3 elements of torch.float32'
    """
    return f"{tensor.numel()} elements of {tensor.dtype}"
