"""Rows of a table whose parameters or gradients rest elsewhere, taken where these are, and as few times as may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerokern.memory.rest import Rest

__all__ = ["Visits"]

Ranges = Sequence[tuple[int, int]]
Stop = tuple[list[Rest], list[tuple[int, int]]]


class Visits:
    """Rows that rest together are taken together, the next fetched while one is updated."""

    def __init__(self, written: Sequence[Rest | None] = (), read: Sequence[Rest | None] = ()) -> None:
        """Of each row: where what is written is, a parameter, and what is read, its gradient. Nothing: in memory."""
        self._pairs = list(zip(written, read, strict=True))
        self._written = {id(rest) for rest in written}
        self._begun: list[Rest] = []
        self._ahead: list[Rest] | None = None  # those that the next call begins with, which are begun

    def of(self, ranges: Ranges, then: Ranges = ()) -> Iterator[tuple[int, int]]:
        """These rows, as ranges that may be updated now; those that the next call begins with are on their way then."""
        stops = self._stops(ranges)
        following = self._stops(then)[:1]
        for rests, _ in stops[:1]:
            if self._ahead != rests:
                self._begin(rests)
        self._ahead = None
        for place, (rests, some) in enumerate(stops):
            for ahead, _ in [*stops, *following][place + 1 : place + 2]:
                self._begin(ahead)
                self._ahead = ahead if place + 1 == len(stops) else None
            for rest in rests:
                rest.wait()
                if id(rest) in self._written:
                    rest.change()
            yield from some
            for rest in rests:
                self._begun.remove(rest)
                rest.leave(awaited=id(rest) in self._written)  # by its forward

    def end(self) -> None:
        """Nothing more is visited, and nothing stays fetched."""
        self._ahead = None
        while self._begun:
            self._begun.pop().leave()

    def _begin(self, rests: list[Rest]) -> None:
        for rest in rests:
            rest.fetch()
            self._begun.append(rest)

    def _stops(self, ranges: Ranges) -> list[Stop]:
        if not self._pairs:
            return [([], list(ranges))]
        found: dict[tuple[int, int], Stop] = {}
        for begin, end in ranges:
            for row in range(begin, end):
                pair = self._pairs[row]
                rests = [rest for rest in pair if rest is not None]
                _, some = found.setdefault((id(pair[0]), id(pair[1])), (rests, []))
                if some and some[-1][1] == row:
                    some[-1] = (some[-1][0], row + 1)
                else:
                    some.append((row, row + 1))
        return list(found.values())
