"""A search for a contestant's best setting: a coarse grid, then the neighbours of what was fastest, then a final.

The disk changes speed from second to second. So in each stage all settings take turns, and a setting's score is the
median of its shares of the middle rate of each turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Setting = TypeVar("Setting")

PARENTS, FINALISTS = 3, 5
COARSE_TURNS, NEAR_TURNS, FINAL_TURNS = 2, 2, 7


class Stages:
    """Scores of the settings that took part in a stage; a turn is one trial of each, in a fresh order."""

    def __init__(self, rate: Callable[[Setting], float], limit_s: float) -> None:
        self._rate, self._limit_s = rate, limit_s
        self._order = random.Random(0)

    def scores(self, settings: Sequence[Setting], turns: int) -> dict[Setting, float]:
        """When the time of a stage is over, no further turn begins."""
        deadline = time.monotonic() + self._limit_s
        shares: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for turn in range(turns):
            if turn and time.monotonic() > deadline:
                break
            rates = {setting: self._rate(setting) for setting in self._order.sample(settings, len(settings))}
            middle = statistics.median(rates.values())
            for setting, rate in rates.items():
                shares[setting].append(rate / middle)
        return {setting: statistics.median(found) for setting, found in shares.items()}


def ranked(
    coarse: Sequence[Setting],
    neighbours: Callable[[Setting], Iterable[Setting]],
    rate: Callable[[Setting], float],
    *,
    limit_s: float = 10.0,
) -> list[Setting]:
    """All settings that were tried, the fastest first: a stage decides about its own, those before it about the rest.

    >>> ranked([1, 8], lambda n: (n - 1, n + 1), lambda n: 1 / (1 + abs(n - 7)))[0]
    7
    """
    stages = Stages(rate, limit_s)
    first = best(stages.scores(coarse, COARSE_TURNS))
    near = dict.fromkeys(setting for parent in first[:PARENTS] for setting in (parent, *neighbours(parent)))
    second = best(stages.scores(list(near), NEAR_TURNS)) if near.keys() - set(first) else first
    last = best(stages.scores(second[:FINALISTS], FINAL_TURNS))
    return list(dict.fromkeys([*last, *second, *first]))


def best(scores: dict[Setting, float]) -> list[Setting]:
    return sorted(scores, key=lambda setting: -scores[setting])
