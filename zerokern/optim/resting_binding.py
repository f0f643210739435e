"""A survey joined to state in memory, of parameters whose values rest elsewhere: fetched, updated and stored again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from zerokern.optim.binding import Binding
from zerokern.optim.interrupts import whole
from zerokern.optim.visits import Visits
from zerokern.zero.kinds import rest_of

__all__ = ["RestingBinding"]


class RestingBinding(Binding):
    """As `Binding`, in as many native calls as there are places that parameters rest in."""

    _done = False

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        self._done = False
        params = self.survey.params
        self._visits = Visits([rest_of(param) for param in params], self.survey.gradient_rests)
        super().prepare(settings, pointers)

    def run(self, scale: float) -> None:
        """The update. An error before the first of its parts leaves everything as it was."""
        try:
            with whole("the step"):
                for begin, end in self._visits.of([(0, self.table.nseg)]):
                    self.run_rows(scale, begin, end)
                self._done = True
        except BaseException:
            if self.torn:
                self.survey.cells.bump_versions()
            raise
        finally:
            self._visits.end()

    def take_turn(self, turn: int, scale: float) -> None:
        """What the next turn begins with is on its way in meanwhile."""
        then = self._ranges[turn + 1] if turn + 1 < len(self._ranges) else ()
        try:
            for begin, end in self._visits.of(self._ranges[turn], then):
                self.run_rows(scale, begin, end)
        except BaseException:
            self._visits.end()
            raise

    def put_away(self) -> None:
        self._visits.end()
        self._done = True

    def break_off(self) -> None:
        self._visits.end()

    @property
    def carried_out(self) -> bool:
        return self._done

    @property
    def torn(self) -> bool:
        """Whether the last update was broken off when a part of the parameters had been updated."""
        return self.begun and not self._done
