"""How large the acts are: the full ones, and those that this machine does in the time of the default demo."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from zerokern.memory.room import memory_left

from ..model import Shape
from . import larger, memory, race, together
from .act import Act
from .cost import measure

WIDTHS = (512, 384, 256)  # of the model of all acts but the second, the widest that fits
STEPS = 60  # that the acts take of it, all together
RACE_S = 14.0  # of the second act
STEPS_S = 40.0  # that these may take
HELD_AT_ONCE = 24  # bytes per parameter: what an act holds at most, and its activations
RESERVED_S = {"1": 10.0, "2": 8.0, "3": 18.0, "4": 22.0}  # what each act needs at least, kept from those before it


@dataclass(frozen=True)
class Acts:
    """All that is performed; the first act has a cap or two."""

    memory: tuple[Act, ...]
    race: Act
    together: Act
    larger: Act


FULL = Acts((memory.FULL, memory.LOWER), race.FULL, together.FULL, larger.FULL)


def small(width: int) -> Acts:
    """The acts of the default demo, with a model of this width."""
    shape = Shape(8, width, 64)
    some = Act(shape, (), rows=2, steps=10, least=3, lr=1e-3, seconds=4.0, warmup=8)
    return Acts(
        (replace(some, contenders=("torch", "exact", "int8-split8")),),
        replace(race.FULL, shape=Shape(4, 256, 64), steps=60, least=5, lr=1e-3, seconds=RACE_S),
        replace(some, steps=8, lr=5e-4, world=2, stage=3),
        replace(some, lr=3e-4, ring_nbytes=4 << 20, stage=3),
    )


def fitting(deadline: float | None = None) -> Acts:
    """The largest acts that this machine has the time and the memory for; measures a step to know."""
    least = small(WIDTHS[-1])
    cost, left = measure(least.memory[0], "exact", deadline), min(memory_left().values(), default=0)
    for width in WIDTHS:
        acts = small(width)
        numel = acts.larger.shape.numel
        seconds = cost.seconds * numel / least.larger.shape.numel
        if STEPS * seconds <= STEPS_S and HELD_AT_ONCE * numel <= left:
            return acts
    return least


class Clock:
    """When each act has to end, so that all of them end in time."""

    def __init__(self, seconds: float | None, start: float) -> None:
        """`seconds` from `start` on, of time.monotonic(); None: they take what they need."""
        self.start, self.seconds = start, seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def deadline(self, act: str, later: tuple[str, ...]) -> float | None:
        """The end of an act, of time.monotonic(), that leaves the later ones what they need at least."""
        if self.seconds is None:
            return None
        left = self.seconds - self.elapsed - sum(RESERVED_S[one] for one in later)
        return time.monotonic() + max(left, RESERVED_S[act])
