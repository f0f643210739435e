"""Which tests `make test` runs: those that find the most for their CPU seconds.

First come the tests that must run: one that finds each mutant, the rules of the repository, the kinds of CPU. Then
those that enter each public name. Then whichever enters most blocks of the library that no chosen test enters, for each
second it takes, until none enters a new one. What is left of the budget goes to the cheapest tests.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Chosen", "Row", "choose", "is_named"]

LEAST_S = 0.02  # what a test costs around its own seconds: set-up, reports


@dataclass(frozen=True)
class Row:
    """A test as it was measured."""

    name: str
    seconds: float
    blocks: frozenset[int]

    @property
    def cost(self) -> float:
        return max(self.seconds, LEAST_S)


@dataclass(frozen=True)
class Chosen:
    """`gains`: for each test of the lane how many blocks it was the first to enter, in the order of choosing."""

    gains: Mapping[str, int]
    seconds: float
    entered: frozenset[int]


def choose(rows: Iterable[Row], must: Collection[str], budget_s: float, first: frozenset[int] = frozenset()) -> Chosen:
    """`must`: tests, functions, files or folders. `first`: blocks to be entered before any others are looked at."""
    left = {row.name: row for row in rows}
    gains: dict[str, int] = {}
    entered: set[int] = set()
    seconds = 0.0

    def take(row: Row) -> None:
        nonlocal seconds
        seconds += row.cost
        gains[row.name] = len(row.blocks - entered)
        entered.update(row.blocks)
        del left[row.name]

    for row in list(left.values()):
        if any(is_named(row.name, one) for one in must):
            take(row)
    for wanted in (first, frozenset().union(*(row.blocks for row in left.values()))):
        heap = [(-len(row.blocks & wanted) / row.cost, row.name) for row in left.values()]
        heapq.heapify(heap)
        while heap:
            _, name = heapq.heappop(heap)
            now = len((left[name].blocks & wanted) - entered) / left[name].cost
            if not now or seconds + left[name].cost > budget_s:
                continue
            if heap and -heap[0][0] > now:  # others have entered some of it since: it waits for its new turn
                heapq.heappush(heap, (-now, name))
                continue
            take(left[name])
    for row in sorted(left.values(), key=lambda row: (row.cost, row.name)):
        if seconds + row.cost > budget_s:
            break
        take(row)
    return Chosen(gains, seconds, frozenset(entered))


def is_named(test: str, name: str) -> bool:
    """Whether `name` is this test, its function, its file or a folder that it lies in.

    >>> is_named("tests/a/b.py::test[1]", "tests/a"), is_named("tests/a/b.py::test_2", "tests/a/b.py::test")
    (True, False)
    """
    return test == name or test.startswith((f"{name}[", f"{name}::", f"{name}/"))
