"""Rows of a product that stand for all of it: any two of its settings meet in one of them, or any three."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
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
