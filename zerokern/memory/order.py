"""Reads `tier=`: one tier, or several with budgets in the order in which they are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerokern.core.errors import BudgetError, got
from zerokern.core.units import parse_nbytes
from zerokern.memory.room import amount
from zerokern.memory.tier import AnyTier, TierConfig, check_tier, config_of, name_of

__all__ = ["TierOrder"]

_ALLOWED = "a tier, or a list of tiers that are filled one after the other, such as ['cpu:64GiB', zk.Nvme(path)]"


@dataclass(frozen=True)
class TierOrder:
    """Tiers in the order in which they are filled, each with the most bytes that may rest there (None: what there is).

    `said`: what was given, for messages.

    >>> order = TierOrder.of("tier", ["device:1KiB", "cpu"])
    >>> order.tiers, order.budgets, order
    (('device', 'cpu'), (1024, None), ['device:1KiB', 'cpu'])
    """

    said: Any
    tiers: tuple[AnyTier, ...]
    budgets: tuple[int | None, ...]

    @staticmethod
    def of(argument: str, value: object) -> TierOrder:
        """Returns the order that was asked for, or raises an error that says what there is."""
        if not isinstance(value, list | tuple):
            listed = [value]
        elif not value:
            raise ValueError(got(argument, value, _ALLOWED))
        else:
            listed = list(value)
        pairs = [_parsed(argument, one) for one in listed]
        order = TierOrder(value, tuple(tier for tier, _ in pairs), tuple(budget for _, budget in pairs))
        order._check(argument)
        return order

    def _check(self, argument: str) -> None:
        names = [name_of(tier) for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(got(argument, self.said, _ALLOWED, "Name each tier once"))
        for tier, budget in list(zip(self.tiers, self.budgets, strict=True))[:-1]:
            if config_of(tier) is not None:
                raise ValueError(got(argument, self.said, _ALLOWED, "A disk comes last"))
            if budget is None:
                do = f"{tier!r} without a budget takes everything: give it one ('{tier}:8GiB'), or let it be the last"
                raise ValueError(got(argument, self.said, _ALLOWED, do))

    @property
    def config(self) -> TierConfig | None:
        """The tier that must be opened, if there is one."""
        return config_of(self.tiers[-1])

    @property
    def name(self) -> str:
        """The kinds of its tiers, which are the same on all ranks; their paths and budgets may differ.

        >>> TierOrder.of("tier", ["device:1KiB", "cpu"]).name
        'device, cpu'
        """
        return ", ".join(map(name_of, self.tiers))

    @property
    def in_memory(self) -> int | None:
        """The most bytes in host memory, where that is the device's memory too; None: what there is.

        >>> TierOrder.of("tier", ["device:1KiB", "cpu:1KiB"]).in_memory
        2048
        """
        budgets = [budget for tier, budget in zip(self.tiers, self.budgets, strict=True) if config_of(tier) is None]
        return None if None in budgets else sum(filter(None, budgets))

    def beyond(self, sizes: Sequence[int], held: int) -> list[bool]:
        """Returns which of these parts, in the order in which they are needed, go to the disk: those that do not fit.

        `held`: bytes that are in memory already. Raises where there is no disk.

        >>> TierOrder.of("tier", "cpu").beyond([600, 600], 0)
        [False, False]
        """
        left = None if self.in_memory is None else max(0, self.in_memory - held)
        found = []
        for size in sizes:
            fits = left is None or size <= left
            left = left if left is None or not fits else left - size
            found.append(not fits)
        if self.config is None and any(found):
            wanted = sum(sizes)
            raise BudgetError(
                f"{amount(wanted)} of optimizer state do not fit into tier={self.said!r}, of which "
                f"{amount(max(0, (self.in_memory or 0) - held))} are left; a larger budget, or zk.Nvme(path) as the "
                "last tier, takes them"
            )
        return found


def _parsed(argument: str, value: Any) -> tuple[AnyTier, int | None]:
    if isinstance(value, str) and ":" in value:
        name, budget = value.split(":", 1)
        if name in ("device", "cpu"):
            return name, parse_nbytes(f"the budget of {argument}", budget)
    return check_tier(argument, value), None
