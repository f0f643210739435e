"""Reads `tier=`: one tier, or several with budgets in the order in which they are filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerokern.core.errors import got
from zerokern.core.units import AUTO, parse_nbytes
from zerokern.memory.tier import AnyTier, TierConfig, check_tier, config_of, name_of

__all__ = ["Budget", "TierOrder", "place", "read_order"]

Budget = int | Literal["auto"] | None
"""bytes | what a step leaves free | what there is"""

_IN_MEMORY = ("device", "cpu")
_ORDER = [*_IN_MEMORY, "disk"]
_ALLOWED = "a tier, or a list of tiers that are filled one after the other, such as ['cpu:64GiB', zk.Nvme(path)]"


@dataclass(frozen=True)
class TierOrder:
    """Tiers in the order in which they are filled, each with the most bytes that may rest there (None: what there is).

    `said`: what was given, for messages.

    >>> order = TierOrder.of("tier", ["device:1KiB", "cpu"])
    >>> order.tiers, order.budgets, order.name
    (('device', 'cpu'), (1024, None), 'device, cpu')
    """

    said: Any
    tiers: tuple[AnyTier, ...]
    budgets: tuple[Budget, ...]

    @staticmethod
    def of(argument: str, value: object, *, auto: bool = False) -> TierOrder:
        """Returns the order that was asked for, or raises an error that says what there is."""
        pairs = read_order(argument, value, auto=auto)
        return TierOrder(value, tuple(tier for tier, _ in pairs), tuple(budget for _, budget in pairs))

    @property
    def config(self) -> TierConfig | None:
        """The tier that must be opened, if there is one."""
        return config_of(self.tiers[-1])

    def kinds(self, *, apart: bool, free: int = 0) -> dict[str, int | None]:
        """Returns the budgets by kind of tier: "device", "cpu" or "disk".

        `apart`: the device that computes has memory of its own; else its budget is the host's. `free`: what "auto" is.

        >>> TierOrder.of("tier", ["device:1KiB", "cpu:2KiB", zk.Nvme(".")]).kinds(apart=False)
        {'cpu': 3072, 'disk': None}
        """
        pairs = zip(self.tiers, self.budgets, strict=True)
        found = {"disk" if config_of(tier) else str(tier): free if budget == AUTO else budget for tier, budget in pairs}
        memory = [found.pop(kind) for kind in _IN_MEMORY if kind in found and not apart]
        return {"cpu": None if None in memory else sum(filter(None, memory)), **found} if memory else found

    @property
    def name(self) -> str:
        """The kinds of its tiers, which are the same on all ranks; their paths and budgets may differ."""
        return ", ".join(map(name_of, self.tiers))


def read_order(
    argument: str, value: Any, check: Callable[[str, Any], Any] = check_tier, *, auto: bool = False
) -> list[tuple[Any, Budget]]:
    """Returns each tier, as `check` has it, with its budget; raises where they cannot be filled one after the other.

    `auto`: whether "device:auto" has a meaning here.

    >>> read_order("tier", ["device:2GiB", "cpu"]), read_order("tier", ["device:auto", "cpu"], auto=True)
    ([('device', 2147483648), ('cpu', None)], [('device', 'auto'), ('cpu', None)])
    """
    listed = [_split(argument, one, auto) for one in (value if isinstance(value, list | tuple) else [value])]
    pairs = [(check(argument, tier), budget) for tier, budget in listed]
    names = [tier if tier in _IN_MEMORY else "disk" for tier, _ in listed]
    do = "" if pairs else "It is empty"
    if names != sorted(set(names), key=_ORDER.index):
        do = "They come in the order 'device', 'cpu', a disk, each of them once"
    for name, (_, budget) in list(zip(names, pairs, strict=True))[:-1]:
        if budget is None and not do:
            do = f"{name!r} without a budget takes everything: give it one ('{name}:8GiB'), or let it be the last"
    if pairs and pairs[-1][1] is not None and not do:
        do = f"The last tier takes what is left, and has no budget: {names[-1]!r}"
    if do:
        raise ValueError(got(argument, value, _ALLOWED, do))
    return pairs


def _split(argument: str, value: Any, auto: bool) -> tuple[Any, Budget]:
    name, _, budget = value.partition(":") if isinstance(value, str) else ("", "", "")
    if auto and (name, budget) == ("device", AUTO):
        return name, AUTO
    return (name, parse_nbytes(f"the budget in {argument}", budget)) if name in _IN_MEMORY and budget else (value, None)


def place(sizes: Sequence[int], budgets: Sequence[int | None], held: Sequence[int] = ()) -> list[int]:
    """Returns for each part the number of its tier: the first one that has room for all of it.

    `sizes`: in bytes, in the order in which parts are needed. `held`: bytes that are in each tier already. A part that
    fits nowhere gets the number after the last.

    >>> place([600, 600, 300, 900], [1000, 900])
    [0, 1, 0, 2]
    >>> place([600, 600], [1000, None], held=[500, 0])
    [1, 1]
    """
    left = [budget if budget is None else budget - used for budget, used in _pairs(budgets, held)]
    found = []
    for size in sizes:
        number = next((n for n, room in enumerate(left) if room is None or size <= room), len(left))
        found.append(number)
        if number < len(left) and (room := left[number]) is not None:
            left[number] = room - size
    return found


def _pairs(budgets: Sequence[int | None], held: Sequence[int]) -> list[tuple[int | None, int]]:
    return list(zip(budgets, held or [0] * len(budgets), strict=True))
