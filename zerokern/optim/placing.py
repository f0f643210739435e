"""Chooses where state rests, by the budgets of tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zerokern.core.errors import got
from zerokern.memory import HostTier
from zerokern.memory.order import TierOrder, place
from zerokern.memory.tier import config_of
from zerokern.optim.device import is_apart
from zerokern.optim.disk import on_disk_of

__all__ = ["UPDATES", "Placing", "check_update"]

UPDATES = ("host", "device", "auto")


def check_update(value: object, order: TierOrder) -> str:
    """Returns where updates of state in host memory run, or raises an error that says what there is.

    >>> check_update("device", TierOrder.of("tier", "cpu"))
    'device'
    """
    if not isinstance(value, str) or value not in UPDATES:
        raise ValueError(got("update", value, "'host', 'device' or 'auto'"))
    if value == "device" and order.config is not None:
        do = "State streams to the device from host memory alone, tier='cpu' or ['device:8GiB', 'cpu']"
        raise ValueError(got("update", value, "'host' or 'auto' where tier= has a disk", do))
    return value


class Placing:
    """Chooses by the budgets of `order`; what was placed once stays where it is.

    `room`: host memory that state lies in. `there`: parameters lie on a device with memory of its own.

    >>> import torch
    >>> placing = Placing(TierOrder.of("tier", "cpu"), HostTier("example"))
    >>> placing.choose({}, [(torch.ones(3), 24)])
    ['cpu']
    """

    def __init__(self, order: TierOrder, room: HostTier | None) -> None:
        self._order, self.room, self.there = order, room, False
        self.turns: Mapping[int, int] = {}  # by a parameter's id, when forwards need it; others as they are asked for

    def choose(self, state: Mapping[Any, Any], wanted: Sequence[tuple[Tensor, int]]) -> list[str]:
        """Returns where the state of each of these (parameter, bytes of its state) rests: "device", "cpu" or "disk".

        What forwards need first has the first claim.
        """
        found = [self._known(param, state.get(param)) for param, _ in wanted]
        new = [number for number, kind in enumerate(found) if kind is None]
        new.sort(key=lambda number: self.turns.get(id(wanted[number][0]), 0))
        tiers = self._tiers()
        if self.there:  # copies in host memory were made for want of room on the device
            tiers.pop("device", None)
        for number, kind in zip(new, self._filled(tiers, [wanted[number][1] for number in new], 0), strict=True):
            found[number] = kind
        return [kind for kind in found if kind is not None]

    def divide(self, sizes: Sequence[int], held_there: int) -> list[str]:
        """Returns where state of so many bytes rests, of parameters in the order in which forwards need them.

        `held_there`: bytes of state that are on the device already.
        """
        return self._filled(self._tiers(), sizes, held_there)

    def _filled(self, tiers: Mapping[str, int | None], sizes: Sequence[int], held_there: int) -> list[str]:
        kinds, used = list(tiers), {"device": held_there, "cpu": 0 if self.room is None else self.room.kept_nbytes}
        held = [used.get(kind, 0) for kind in kinds]
        return [kinds[number] for number in place(sizes, list(tiers.values()), held)]

    def _tiers(self) -> dict[str, int | None]:
        """Returns the tiers with their budgets. Where a device has no memory of its own, its budget is the host's."""
        pairs = zip(self._order.tiers, self._order.budgets, strict=True)
        tiers = {"disk" if config_of(tier) else str(tier): budget for tier, budget in pairs}
        if not self.there and {"device", "cpu"} <= tiers.keys():
            memory = tiers.pop("device"), tiers.pop("cpu")
            tiers = {"cpu": None if None in memory else sum(filter(None, memory)), **tiers}
        return tiers

    def _known(self, param: Tensor, entry: Any) -> str | None:
        if on_disk_of(entry) is not None:
            return "disk"
        if self.room is not None and self.room.keeps(param):
            return "cpu"
        return "device" if self.there and is_apart(param) else None
