"""Chooses where state rests, by the budgets of tiers."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerokern.core.errors import StateError, got
from zerokern.core.units import AUTO, FILLED
from zerokern.memory import HostTier
from zerokern.memory.copies import Driver
from zerokern.memory.order import TierOrder
from zerokern.optim.device import is_apart
from zerokern.optim.records import on_disk_of

__all__ = ["Placing", "check_whole"]


def check_whole(tier: object, update: str, *, apart: bool) -> None:
    """Raises where matrices that are updated whole cannot be updated there with their state in `tier`.

    `apart`: they are on a device with memory of its own.

    >>> check_whole("cpu", "device", apart=True)
    >>> check_whole("cpu", "host", apart=True)
    Traceback (most recent call last):
    ...
    ValueError: update='host': must be 'device'. Matrices are never orthogonalized on the host where parameters are on \
a GPU
    """
    if apart and update == "host" and tier != "device":
        do = "Matrices are never orthogonalized on the host where parameters are on a GPU"
        raise ValueError(got("update", update, "'device'", do))


_GROWN = (
    "the state of parameters that are updated on the device has grown from {before} to {now} bytes, and the budget "
    "there is {budget}; load this optimizer's state_dict() into one that is built with the new settings, which places "
    "all anew"
)
_log = logging.getLogger("zerokern")
# of optimizers that take what is free on a device, in the order in which they asked
_measured: weakref.WeakKeyDictionary[Placing, None] = weakref.WeakKeyDictionary()


class Placing:
    """Chooses by the budgets of `order`; what was placed once stays where it is.

    `room`: host memory that state lies in. `there`: parameters lie on a device with memory of its own. `free`: the
    bytes that "device:auto" is, once they are known; they do not change any more. `claimed`: those of state that has
    been given a place on the device, made or not.

    >>> import torch
    >>> placing = Placing(TierOrder.of("tier", "cpu"), HostTier("example"))
    >>> placing.choose({}, [(torch.ones(3), 24)])
    ['cpu']
    """

    def __init__(self, order: TierOrder, room: HostTier | None) -> None:
        self._order, self.room, self.there = order, room, False
        self.free: int | None = None
        self.claimed = 0
        self._peak = 0  # the device's, when that was asked
        self._driver: Driver | None = None
        self.turns: Mapping[int, int] = {}  # by a parameter's id, when forwards need it; others as they are asked for
        self._below = WeakTensorKeyDictionary()  # parameters that a device updates, with their state on the disk

    def choose(self, state: Mapping[Any, Any], wanted: Sequence[tuple[Tensor, int]]) -> list[str]:
        """Returns where the state of each of these (parameter, bytes of its state) rests: "device", "cpu" or "disk".

        What forwards need first has the first claim. State in host memory that has grown is placed anew if the budget
        there has no room for it.
        """
        found = [self._known(param, state.get(param)) for param, _ in wanted]
        budget, kept = self._order.kinds(apart=self.there).get("cpu"), self._kept_by()
        near = [number for number, kind in enumerate(found) if kind == "cpu"]
        grown = [number for number in near if wanted[number][1] > kept[id(wanted[number][0])]]
        if budget is not None and grown:
            before = sum(kept[id(wanted[number][0])] for number in grown)
            if kept.total() - before + sum(wanted[number][1] for number in grown) > budget:
                for number in grown:
                    found[number] = None
                    kept[id(wanted[number][0])] = 0
        new = [number for number, kind in enumerate(found) if kind is None]
        new.sort(key=lambda number: self.turns.get(id(wanted[number][0]), 0))
        tiers = self._order.kinds(apart=self.there, free=self.free or 0)
        if self.there:  # copies in host memory were made for want of room on the device
            tiers.pop("device", None)
            tiers = tiers or {"cpu": None}  # of what zk.shard has put there
        sizes = [wanted[number][1] for number in new]
        for number, kind in zip(new, self._filled(tiers, sizes, 0, kept.total()), strict=True):
            found[number] = kind
        return [kind for kind in found if kind is not None]

    @property
    def waits(self) -> bool:
        """Whether a budget is what a step leaves free, and no step has shown that yet."""
        return AUTO in self._order.budgets and self.free is None

    def measure(self, driver: Driver) -> None:
        """Sets what is free on the device, once: its share that state may fill, less what was in use at the peak.

        State that other optimizers were given there since theirs was measured comes on top of that: no pass since then
        may have shown it, and it may not even exist yet.
        """
        if not self.waits:
            return
        total, peak = driver.memory()
        self._peak, self._driver, needed = peak, driver, 0
        for one in [one for one in list(_measured) if one._driver is driver]:
            needed = max(needed, one._peak) + one.claimed
        peak = max(peak, needed)
        _measured[self] = None
        self.free = max(0, int(FILLED * total) - peak)
        text = "tier='device:auto': state takes %d bytes of %s, %d %% of %d bytes less %d at the peak so far"
        _log.info(text, self.free, driver.device, round(100 * FILLED), total, peak)

    def divide(self, sizes: Sequence[int], held_there: int) -> list[str]:
        """Returns where state of so many bytes rests, of parameters in the order in which forwards need them.

        `held_there`: bytes of state that are on the device already.
        """
        tiers = self._order.kinds(apart=self.there, free=self.free or 0)
        kinds = self._filled(tiers, sizes, held_there, self._kept_by().total())
        self.claimed = held_there + sum(size for size, kind in zip(sizes, kinds, strict=True) if kind == "device")
        return kinds

    def note(self, param: Tensor, kind: str) -> None:
        """Notes where the state of a parameter that a device updates goes, of which nothing is there yet."""
        if kind == "disk":
            self._below[param] = True
        else:
            self._below.pop(param, None)

    def check_growth(self, stays: Sequence[tuple[int, int]]) -> None:
        """Raises where state on the device takes more than its budget. `stays`: of each, its bytes now and before."""
        budget = self._order.kinds(apart=self.there, free=self.free or 0).get("device")
        now, before = (sum(sizes) for sizes in zip(*stays, strict=True)) if stays else (0, 0)
        if budget is not None and now > before and now > budget:
            raise StateError(_GROWN.format(now=now, before=before, budget=budget))

    def forget_moved(self, state: Mapping[Any, Any]) -> None:
        """Forgets the host memory of what has gone to a disk."""
        if self.room is not None:
            self.room.forget([one for one, entry in state.items() if isinstance(one, Tensor) and on_disk_of(entry)])

    def _kept_by(self) -> Counter[int]:
        return Counter[int]() if self.room is None else self.room.kept_by()

    def _filled(
        self, tiers: Mapping[str, int | None], sizes: Sequence[int], held_there: int, held_here: int
    ) -> list[str]:
        used = {"device": held_there, "cpu": held_here}
        return self._order.place(sizes, tiers, {kind: used.get(kind, 0) for kind in tiers})

    def _known(self, param: Tensor, entry: Any) -> str | None:
        if on_disk_of(entry) is not None:
            return "disk"
        if self.room is not None and self.room.keeps(param):
            return "cpu"
        if not (self.there and is_apart(param)):
            return None
        return "disk" if param in self._below else "device"
