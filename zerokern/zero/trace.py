"""Stage 3: the order of the units in a pass, which all ranks follow or leave together."""

from __future__ import annotations

from typing import Protocol

from zerokern.comm import Group

__all__ = ["Trace"]


class Used(Protocol):
    """What a pass uses one after the other: units, by number, and by name for messages."""

    number: int
    called: str


class Trace:
    """The order of the units in a pass of one kind, as it was the last time."""

    def __init__(self, kind: str, group: Group) -> None:
        self.kind, self._group = kind, group
        self._order: list[int] = []
        self._at = 0
        self._known = -1

    def begin(self) -> None:
        self._at = 0

    def use(self, unit: Used) -> None:
        """This unit is next, on this rank; raises if another rank is about to do something else."""
        number, key = unit.number, self.of(unit)
        if self._at and self._order[self._at - 1] == number:
            return  # still
        if self._order[self._at : self._at + 1] == [number]:
            self._group.follow(key)
        else:
            self._group.agree(key)
            self._order[self._at :] = [number]
        self._at += 1

    def of(self, unit: Used) -> str:
        """What a pass does with a unit, as ranks tell each other."""
        return f"the {self.kind} of {unit.called}"

    def next(self) -> int | None:
        """The unit that comes after this one, if all goes as it did."""
        return self._order[self._at] if self._at < len(self._order) else None

    def comes_again(self, number: int) -> bool:
        """Whether the unit is used again, if all goes as it did."""
        return number in self._order[self._at :]

    def end(self) -> None:
        """A pass is over, and the order is known."""
        self._known = self._at

    def last(self, number: int) -> bool:
        """Whether the pass, if all goes as it did, ends with this unit."""
        return self._at == self._known == len(self._order) and self._order[-1:] == [number]
