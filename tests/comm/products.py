"""Rows of a product that stand for all of it: any two of its settings meet in one of them, or any three."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Case = TypeVar("Case")


def covering(rows: Sequence[Sequence[Hashable]], meet: int = 2) -> set[int]:
    """The numbers of rows that together show each `meet` values, by their places, that any row shows together."""
    meetings = [set(itertools.combinations(enumerate(row), min(len(row), meet))) for row in rows]
    left, chosen = set().union(*meetings), set()
    while left:
        best = max(range(len(rows)), key=lambda number: len(meetings[number] & left))
        left -= meetings[best]
        chosen.add(best)
    return chosen


def settings(values: Iterable[Any]) -> list[str]:
    """Values as a row, fields of dataclasses by themselves."""
    return [
        repr(part)
        for value in values
        for part in ([getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else [value])
    ]


def where_they_meet(cases: Sequence[Case], meet: int) -> list[Case]:
    """Those of the cases, tuples of settings, in which any `meet` settings meet that meet in any of them."""
    return [cases[number] for number in sorted(covering([settings(case) for case in cases], meet))]


Rule = tuple[tuple[str, ...], Callable[..., bool]]


class Array:
    """Rows of a product too large to be listed, in which any `meet` values meet that the rules let meet.

    A rule is names of factors and whether values of these may be in one row. Rows are begun with values that have not
    met yet, and filled with those that meet most others for the first time; the same rows every time.
    """

    def __init__(self, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> None:
        self._names, self._values = list(factors), [list(values) for values in factors.values()]
        self._rules: list[list[tuple[list[int], Callable[..., bool]]]] = [[] for _ in factors]
        for names, allows in rules:
            places = [self._names.index(name) for name in names]
            for place in places:
                self._rules[place].append((places, functools.cache(allows)))

    def rows(self, meet: int) -> list[dict[str, Any]]:
        left = dict.fromkeys(
            tuple(zip(places, numbers, strict=True))
            for places in itertools.combinations(range(len(self._names)), meet)
            for numbers in itertools.product(*(range(len(self._values[place])) for place in places))
        )
        rows: list[dict[str, Any]] = []
        while left:
            begun = next(iter(left))
            full = self._filled(dict(begun), left, meet)
            if full is None:  # the rules keep these apart
                del left[begun]
                continue
            for met in itertools.combinations(sorted(full.items()), meet):
                left.pop(met, None)
            rows.append({name: self._values[place][full[place]] for place, name in enumerate(self._names)})
        return rows

    def _filled(self, row: dict[int, int], left: Mapping[tuple, None], meet: int) -> dict[int, int] | None:
        """The row with a value at each place; None if there is none that the rules allow."""
        if not all(self._allowed(row, place) for place in row):
            return None
        open_places = [place for place in range(len(self._names)) if place not in row]
        if not open_places:
            return row
        choices = {
            place: [
                number for number in range(len(self._values[place])) if self._allowed({**row, place: number}, place)
            ]
            for place in open_places
        }
        place = min(open_places, key=lambda one: (len(choices[one]), -len(self._rules[one])))

        def first_met(number: int) -> int:
            others = itertools.combinations(sorted(row.items()), meet - 1)
            return sum(tuple(sorted((*some, (place, number)))) in left for some in others)

        # of equally good ones a later row takes another
        for number in sorted(choices[place], key=lambda one: (-first_met(one), (one + len(left)) % 7)):
            full = self._filled({**row, place: number}, left, meet)
            if full is not None:
                return full
        return None

    def _allowed(self, row: Mapping[int, int], place: int) -> bool:
        return all(
            allows(*(self._values[one][row[one]] for one in places))
            for places, allows in self._rules[place]
            if all(one in row for one in places)
        )
