"""Reads `tier=` and `keep=`: one tier, or several with budgets in the order in which they are filled; and says which
part goes where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerokern.core.errors import got
from zerokern.core.units import AUTO, parse_nbytes, refuse_bare
from zerokern.memory.tier import AnyTier, TierConfig, check_tier, config_of, name_of

__all__ = ["Budget", "Cascade", "TierOrder", "place", "place_latest", "read_order"]

Budget = int | Literal["auto"] | None
"""bytes | what a step leaves free | what there is"""

_IN_MEMORY = ("device", "cpu")
_ORDER = [*_IN_MEMORY, "disk"]
_ALLOWED = "a tier, or a list of tiers that are filled one after the other, such as ['cpu:64GiB', zk.Nvme(path)]"


@dataclass(frozen=True)
class TierOrder:
    """Tiers in the order in which they are filled, each with the most bytes that may rest there (None: what there is).

    >>> order = TierOrder.of("tier", ["device:1KiB", "cpu"])
    >>> order.tiers, order.budgets, order.name
    (('device', 'cpu'), (1024, None), 'device, cpu')
    """

    tiers: tuple[AnyTier, ...]
    budgets: tuple[Budget, ...]

    @staticmethod
    def of(argument: str, value: object, *, auto: bool = False) -> TierOrder:
        """Returns the order that was asked for, or raises an error that says what there is."""
        if isinstance(value, TierOrder):
            return value
        pairs = read_order(argument, value, auto=auto)
        return TierOrder(tuple(tier for tier, _ in pairs), tuple(budget for _, budget in pairs))

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

    def place(self, sizes: Sequence[int], budgets: Mapping[str, int | None], held: Mapping[str, int]) -> list[str]:
        """Returns for each part the kind of its tier. Another order of tiers may choose otherwise.

        `sizes`: in bytes, in the order in which parts are needed. `budgets`, `held`: bytes by kind of tier.

        >>> order = TierOrder.of("tier", ["device:1KiB", "cpu"])
        >>> order.place([600, 600, 300], {"device": 1024, "cpu": None}, {"device": 0, "cpu": 0})
        ['device', 'cpu', 'device']
        """
        kinds = list(budgets)
        return [kinds[number] for number in place(sizes, list(budgets.values()), [held[kind] for kind in kinds])]

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
    if name not in _IN_MEMORY or not budget:
        return value, None
    nbytes = parse_nbytes(f"the budget in {argument}", budget)
    refuse_bare(f"the budget in {argument}", budget, nbytes)
    return name, nbytes


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


class Cascade:
    """Keeps what came last in the first of several tiers that has room for it; the oldest there move on to make room.

    Parts that are needed again in the reverse of their order, such as inputs that a backward pass recomputes from, wait
    least this way, and nobody has to know sizes before. Each part passes every tier once at most.

    Args:
        budgets: bytes for each tier, of which the last is None: what there is.
        move: called with a part and the number of its new tier, moves it there, and returns the bytes that it takes
            there, its size or more. If it raises, all parts are where they were, or where they have been moved before.

    >>> cascade = Cascade([1000, 900, None], lambda part, number: 600)
    >>> cascade.add("a", 600); cascade.add("b", 600); cascade.add("c", 600); cascade.held(0), cascade.held(2)
    (600, 600)
    >>> [(part, number) for part, number in cascade.parts()]
    [('c', 0), ('b', 1), ('a', 2)]
    """

    def __init__(self, budgets: Sequence[int | None], move: Callable[[Any, int], int]) -> None:
        self._budgets, self._move = list(budgets), move
        self._tiers: list[dict[Hashable, int]] = [{} for _ in budgets]  # bytes by part, the oldest first
        self._held = [0] * len(self._budgets)
        self._known: dict[Hashable, tuple[int, int]] = {}  # age and size by part
        self._ages = itertools.count()
        self._gone: list[Hashable] = []

    def add(self, part: Hashable, size: int, first: int = 0) -> None:
        """Puts a new part, the youngest, in a tier, from the tier `first` on; of one that is there, makes it the
        youngest where it is."""
        self._drop_gone()
        number = next((number for number, tier in enumerate(self._tiers) if part in tier), None)
        self._known[part] = next(self._ages), size
        if number is None:
            self._admit(part, first)
        else:
            self._tiers[number][part] = self._tiers[number].pop(part)

    def discard(self, part: Hashable) -> None:
        """Forgets a part, and gives back its bytes. It may be called at any moment, by the garbage collector too."""
        self._gone.append(part)

    def held(self, number: int) -> int:
        """Returns the bytes of all parts in a tier."""
        self._drop_gone()
        return self._held[number]

    def parts(self) -> Iterator[tuple[Any, int]]:
        """Yields each part and the number of its tier, in the order of the tiers, in each the oldest first."""
        self._drop_gone()
        for number, tier in enumerate(self._tiers):
            yield from ((part, number) for part in list(tier))

    def _admit(self, part: Hashable, number: int, leaves: int | None = None) -> None:
        """Puts a part in the first tier from `number` on whose older parts can make room for it."""
        age, size = self._known[part]
        while not self._has_room(number, age, size):
            number += 1
        self._make_room(number, size)
        nbytes = self._move(part, number)
        if leaves is not None:
            self._held[leaves] -= self._tiers[leaves].pop(part)
        tier = self._tiers[number]
        is_oldest_first = not tier or self._known[next(reversed(tier))][0] < age
        tier[part] = nbytes
        self._held[number] += nbytes
        if not is_oldest_first:
            self._tiers[number] = dict(sorted(tier.items(), key=lambda item: self._known[item[0]][0]))
        self._make_room(number, 0)  # it may take more than its size

    def _has_room(self, number: int, age: int, size: int) -> bool:
        room = self._budgets[number]
        if room is None:
            return True
        for part, nbytes in reversed(self._tiers[number].items()):
            if self._known[part][0] < age or size > room:
                break
            room -= nbytes
        return size <= room

    def _make_room(self, number: int, size: int) -> None:
        budget = self._budgets[number]
        while budget is not None and self._held[number] + size > budget:
            self._admit(next(iter(self._tiers[number])), number + 1, number)

    def _drop_gone(self) -> None:
        while self._gone:
            part = self._gone.pop()
            self._known.pop(part, None)
            for number, tier in enumerate(self._tiers):
                self._held[number] -= tier.pop(part, 0)


def place_latest(sizes: Sequence[int], budgets: Sequence[int | None]) -> list[int]:
    """Returns for each part the number of its tier, after they have come one by one to a `Cascade`.

    >>> place_latest([600, 600, 300, 900], [1000, 900, None])
    [2, 1, 1, 0]
    """
    cascade = Cascade(budgets, lambda part, number: sizes[part])
    for part, size in enumerate(sizes):
        cascade.add(part, size)
    found = dict(cascade.parts())
    return [found[part] for part in range(len(sizes))]
