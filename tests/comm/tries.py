"""What depends on the moment is tried again: other processes take the cores for seconds now and then.

What depends on order or on counts needs none of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PATIENCE_S = 60.0


def best(measure: Callable[[], float], enough: float) -> float:
    """The least of as many measures as it takes for one below `enough`: others make some larger, and none smaller."""
    until = time.monotonic() + PATIENCE_S
    least = measure()
    while least >= enough and time.monotonic() < until:
        time.sleep(0.01)
        least = min(least, measure())
    return least


class Missed(Exception):
    """What was to be seen had passed before this process got a core: that shows nothing, either way."""


def in_time(attempt: Callable[[float], Result], seconds: float) -> Result:
    """attempt(seconds); where that was `Missed` once more, with four times the seconds, up to 64 times."""
    for _ in range(3):
        try:
            return attempt(seconds)
        except Missed:
            seconds *= 4
    return attempt(seconds)
