"""Chooses, of state that an update in host memory changes, what stays there and what goes to the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zerokern.memory import HostTier
from zerokern.memory.order import TierOrder, place
from zerokern.optim.disk import on_disk_of

__all__ = ["Placing"]


class Placing:
    """Chooses by the budgets of `order`; what was placed once stays where it is.

    >>> import torch
    >>> placing = Placing(TierOrder.of("tier", "cpu"), HostTier("example"))
    >>> placing.on_disk({}, [(torch.ones(3), 24)])
    [False]
    """

    def __init__(self, order: TierOrder, room: HostTier | None) -> None:
        self._order, self.room = order, room
        self.turns: Mapping[int, int] = {}  # by a parameter's id, when forwards need it; others as they are asked for

    def on_disk(self, state: Mapping[Any, Any], wanted: Sequence[tuple[Tensor, int]]) -> list[bool]:
        """Returns which of these (parameter, bytes of its state) go to the disk.

        What forwards need first has the first claim to memory.
        """
        budget = self._order.in_memory
        if not budget:
            return [budget == 0] * len(wanted)
        found = [self._known(param, state.get(param)) for param, _ in wanted]
        new = [number for number, known in enumerate(found) if known is None]
        new.sort(key=lambda number: self.turns.get(id(wanted[number][0]), 0))
        held = 0 if self.room is None else self.room.kept_nbytes
        for number, tier in zip(new, place([wanted[number][1] for number in new], [budget], [held]), strict=True):
            found[number] = tier > 0
        return list(map(bool, found))

    def _known(self, param: Tensor, entry: Any) -> bool | None:
        if on_disk_of(entry) is not None:
            return True
        return False if self.room is not None and self.room.keeps(param) else None
