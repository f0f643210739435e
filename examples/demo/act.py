"""What an act of the demo trains, as its processes are told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from zerokern.core.units import Stage

from ..model import Shape

WARMUP_SHARE = 0.1
LEAST_STEPS = 20  # whatever the clock says: of fewer nothing can be told


@dataclass(frozen=True)
class Act:
    """A model, its batches and its optimizers; under a memory `cap` where there is one, on `world` processes."""

    shape: Shape
    contenders: tuple[str, ...]
    rows: int
    steps: int
    lr: float
    seconds: float = math.inf
    cap: int = 0
    ring_nbytes: int = 32 << 20  # of host memory, where state rests on disk
    world: int = 1
    stage: Stage = 0
    warmup: float = 0.0  # steps; a tenth of all where it is 0

    def lr_at(self, number: int) -> float:
        """Of the step with this number, from 1 on.

        >>> Act(Shape(1, 64, 8), (), rows=1, steps=20, lr=0.5, seconds=1.0).lr_at(1)
        0.25
        """
        return self.lr * min(1.0, number / (self.warmup or WARMUP_SHARE * self.steps))

    def is_over(self, steps: int, elapsed_s: float) -> bool:
        """Whether the clock ends the act after so many steps.

        >>> slow = Act(Shape(1, 64, 8), (), rows=1, steps=50, lr=0.5, seconds=1.0)
        >>> slow.is_over(LEAST_STEPS - 1, 1e6), slow.is_over(LEAST_STEPS, 1e6), slow.is_over(LEAST_STEPS, 0.5)
        (False, True, False)
        """
        return steps >= LEAST_STEPS and elapsed_s > self.seconds

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Act:
        told = json.loads(text)
        return cls(**told | {"shape": Shape(**told["shape"]), "contenders": tuple(told["contenders"])})
