"""Arithmetic on intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "common", "length", "union"]

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns what at least one interval covers, as sorted intervals that do not touch.

    >>> union([(4, 6), (0, 2), (1, 3), (9, 8)])
    [(0, 3), (4, 6)]
    """
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def common(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """Returns the intersection of two unions.

    >>> common([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    both, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if begin < end:
            both.append((begin, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length."""
    return sum(end - begin for begin, end in intervals)
