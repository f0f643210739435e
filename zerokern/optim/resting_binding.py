"""A survey joined to state in memory, of parameters whose values rest elsewhere: fetched, updated and stored again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from zerokern.memory.rest import Rest
from zerokern.optim.binding import Binding
from zerokern.optim.interrupts import whole
from zerokern.optim.survey import Groups
from zerokern.zero.kinds import rest_of

__all__ = ["RestingBinding", "Visits"]

Ranges = Sequence[tuple[int, int]]


class Visits:
    """Rows of a table, taken together where their parameters rest together, the next fetched while one is updated."""

    def __init__(self, rests: Sequence[Rest | None]) -> None:
        """`rests`: of each row."""
        self._rests = rests
        self._begun: list[Rest] = []

    def of(self, ranges: Ranges) -> Iterator[tuple[int, int]]:
        """These rows, as ranges that may be updated now."""
        stops = self._stops(ranges)
        for stop in stops[:1]:
            self._begin(stop[0])
        for place, (rest, some) in enumerate(stops):
            for following in stops[place + 1 : place + 2]:
                self._begin(following[0])
            if rest is not None:
                rest.wait()
                rest.change()
            yield from some
            if rest is not None:
                self._begun.remove(rest)
                rest.leave(awaited=True)  # by its forward

    def end(self) -> None:
        """Nothing more is visited, and nothing stays fetched."""
        while self._begun:
            self._begun.pop().leave()

    def _begin(self, rest: Rest | None) -> None:
        if rest is not None:
            rest.fetch()
            self._begun.append(rest)

    def _stops(self, ranges: Ranges) -> list[tuple[Rest | None, list[tuple[int, int]]]]:
        found: dict[int, tuple[Rest | None, list[tuple[int, int]]]] = {}
        for begin, end in ranges:
            for row in range(begin, end):
                rest = self._rests[row]
                _, some = found.setdefault(id(rest), (rest, []))
                if some and some[-1][1] == row:
                    some[-1] = (some[-1][0], row + 1)
                else:
                    some.append((row, row + 1))
        return list(found.values())


class RestingBinding(Binding):
    """As `Binding`, in as many native calls as there are places that parameters rest in."""

    _done = False

    def _plan(self, groups: Groups) -> None:
        super()._plan(groups)
        self._visits = Visits([rest_of(param) for param in self.survey.params])

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        self._done = False
        super().prepare(settings, pointers)

    def run(self, scale: float) -> None:
        """The update. An error before the first of its parts leaves everything as it was."""
        try:
            with whole("the step"):
                self._run_ranges([(0, self.table.nseg)], scale)
                self._done = True
        except BaseException:
            if self.torn:
                self.survey.cells.raise_versions()
            raise

    def take_turn(self, turn: int, scale: float) -> None:
        self._run_ranges(self._ranges[turn], scale)

    def _run_ranges(self, ranges: Ranges, scale: float) -> None:
        try:
            for begin, end in self._visits.of(ranges):
                self.run_rows(scale, begin, end)
        finally:
            self._visits.end()

    def put_away(self) -> None:
        self._done = True

    @property
    def carried_out(self) -> bool:
        return self._done

    @property
    def torn(self) -> bool:
        """Whether the last update was broken off when a part of the parameters had been updated."""
        return self.begun and not self._done
