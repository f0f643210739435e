"""Stage 3: which units are gathered, reduced and released, and when, while one of them computes.

A pass goes through the units in an order, usually that of the pass before. `moves_before` returns what happens before a
unit computes, for the code that runs a pass; `step_of` yields a whole step, for the planner and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ROOT", "Move", "Prefetch", "UnitOrder", "moves_before", "step_of"]

ROOT = 0
"""The unit that encloses all others. It is whole from its forward to the end of backward."""
Move = tuple[str, int]
"""A verb, and the number of a unit."""


@dataclass(frozen=True)
class Prefetch:
    """How many units are gathered ahead of their use, as long as all unsharded units have at most nbytes."""

    depth: int = 1
    nbytes: float = math.inf


def moves_before(
    unit: int,
    coming: Sequence[int],
    whole: Collection[int],
    done: Collection[int],
    nbytes: Callable[[int], int],
    ahead: Prefetch,
) -> list[Move]:
    """Returns what is done before a unit computes. `done`: unsharded units that have nothing left to do. `nbytes`: of
    a unit's full parameters, asked where `ahead` bounds them.

    Gathering an unsharded unit does nothing.

    >>> moves_before(5, [4, 3], [0, 5, 6], [6], lambda unit: 1, Prefetch())
    [('Release', 6), ('Gather', 5), ('Gather', 4)]
    >>> moves_before(5, [4, 3], [0, 5, 6], [6], lambda unit: 1, Prefetch(depth=2, nbytes=3))
    [('Release', 6), ('Gather', 5), ('Gather', 4)]
    """
    following = list(coming[: ahead.depth])
    if ahead.nbytes < math.inf:
        there = {unit, *whole}.difference(done)
        room = ahead.nbytes - sum(map(nbytes, there))
        for place, number in enumerate(following):
            room -= 0 if number in there else nbytes(number)
            if room < 0:
                del following[place:]
                break
            there.add(number)
    moves = [("Release", number) for number in done if number not in following]
    moves.append(("Gather", unit))
    for number in following:
        moves.append(("Gather", number))
    return moves


def step_of(order: Sequence[int], nbytes: Sequence[int], ahead: Prefetch | None = None) -> Iterator[Move]:
    """Yields the moves of forward and backward of units side by side, in forward order, inside of the root unit.

    The unit that computes last in forward is the first in backward, and stays unsharded between them.

    >>> " ".join(f"{verb[0]}{unit}" for verb, unit in step_of([1, 2, 3], [1] * 4) if verb in ("Gather", "Release"))
    'G0 G1 G2 R1 G3 R2 G2 R3 G1 R2 R0 R1'
    """
    whole: set[int] = set()
    for verb, units in (("Forward", order), ("Backward", order[::-1])):
        units = [ROOT, *units]
        for place, unit in enumerate(units):
            coming = units[place + 1 :]
            done = sorted(whole - {ROOT, unit}) if verb == "Backward" and unit != ROOT else []
            for move in moves_before(unit, coming, whole, done, nbytes.__getitem__, ahead or Prefetch()):
                if move[0] == "Release" or move[1] not in whole:
                    yield move
                whole ^= {move[1]} if move[0] == "Release" else {move[1]} - whole
            if verb == "Backward":
                yield verb, unit
                yield from [("Reduce", unit)] if unit != ROOT else ()
            elif unit != ROOT:
                yield verb, unit
                if coming:
                    whole.remove(unit)
                    yield "Release", unit
        if verb == "Forward":
            yield verb, ROOT
    yield from (("Release", unit) for unit in sorted(whole))
    yield "Reduce", ROOT


class _Unit(Protocol):
    number: int
    called: str


class _Ranks(Protocol):
    def follow(self, key: str) -> None: ...

    def agree(self, key: str) -> None: ...


class UnitOrder:
    """The order of the units in the last pass of one kind; ranks follow it, or depart from it together."""

    def __init__(self, kind: str, ranks: _Ranks) -> None:
        self.kind, self._ranks = kind, ranks
        self._order: list[int] = []
        self._at = 0
        self._known = -1
        # whether the ranks have left the recorded order in this pass: what comes is not known
        self.left = False

    def begin(self) -> None:
        self._at, self.left = 0, False

    def use(self, unit: _Unit, also: Callable[[], str] = str, *, leaves: bool = False) -> None:
        """Records that this unit is next; raises if another rank does something else.

        `also` is asked where it is new: what the ranks must agree on besides. `leaves`: from here on the order is
        another one, though this unit is next in both.
        """
        number, key = unit.number, self.of(unit)
        if self._at and self._order[self._at - 1] == number:
            return  # it is still this unit's turn
        follows = not leaves and self._order[self._at : self._at + 1] == [number]
        if follows:
            self._ranks.follow(key)
        else:
            self.left = True
            self._ranks.agree(key + also())
            self._order[self._at :] = [number]
        self._at += 1

    def of(self, unit: _Unit) -> str:
        """Returns the key by which ranks agree on a unit's turn in this pass."""
        return f"the {self.kind} of {unit.called}"

    def coming(self, count: int | None = None) -> list[int]:
        """Returns the next `count` units, or all that follow, if the order stays as it was."""
        return self._order[self._at : None if count is None else self._at + count]

    def used(self) -> list[int]:
        """Returns the units that have had a turn in this pass, the last one first."""
        return list(dict.fromkeys(reversed(self._order[: self._at])))

    def at_last_turn_of(self, number: int) -> bool:
        """Returns whether it is this unit's turn, and the recorded order has no other one to come.

        That of the root is beside those of other units: it may come behind one whose output is the root's too.
        """
        at = self._at - (self._order[self._at - 1 : self._at] == [ROOT])
        return not self.left and self._order[at - 1 : at] == [number] and number not in self._order[at:]

    def forget_rest(self) -> None:
        """Ends a pass that went no further: what else was recorded does not come again. A pass without turns says
        nothing."""
        if self._at:
            del self._order[self._at :]

    def end(self) -> None:
        """Ends a pass: from now on the order is known."""
        self._known = self._at

    def last(self, number: int) -> bool:
        """Returns whether the pass ends with this unit, if the order stays as it was."""
        return self._at == self._known == len(self._order) and self._order[-1:] == [number]
