"""What all groups of one process group share."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm import collectives
from zerokern.comm.agreement import Board
from zerokern.comm.group import Group
from zerokern.comm.watch import Watch
from zerokern.comm.whereabouts import Presence

__all__ = ["Common", "CommonGroup", "detail"]


class Common:
    """What all groups of one process group share, on one kind of device: counts of what was posted, board, watch.

    It must not hold the process group, which is the key that it is found by.
    """

    def __init__(self, pg: Any, device: torch.device, timeout_s: float, presence: Presence) -> None:
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self.lane: Any = None
        # a store of its own until all are here
        self.board = Board(dist.HashStore(), self.rank, self.size, timeout_s, presence)
        self.ledger = self.board.ledger
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

        self.watch = Watch(self.board, sever, closed, polls=device.type != "cpu")


class CommonGroup(Group):
    """A group over a process group: which step comes next, its ranks tell each other on the board that they share."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(common.rank, common.size, device, name)
        self._pg, self._common = pg, common

    def follow(self, key: str) -> None:
        self._common.board.follow(key)

    def agree(self, key: str) -> None:
        self._common.watch.agree(key)

    def tie(self, other: Group) -> None:
        if isinstance(other, CommonGroup):
            self._common.watch.tie(other._common.watch)

    def give_up(self, reason: str) -> None:
        self._common.watch.give_up(reason)


def detail(tensor: Tensor) -> str:
    """What a message says of a tensor that is moved.

    >>> detail(torch.ones(3))
    '3 elements of torch.float32'
    """
    return f"{tensor.numel()} elements of {tensor.dtype}"
