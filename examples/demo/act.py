"""What an act of the demo trains, as its processes are told, and the errors that say that a machine has no room."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import asdict, dataclass

from zerokern.core.errors import BudgetError
from zerokern.core.units import Stage

from ..model import Shape

WARMUP_SHARE = 0.1
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "can't start new thread", "Cannot allocate")
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EAGAIN)


class NotHereError(Exception):
    """This machine has no room for an act, or does not show its point; zerokern itself is well."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, whoever asked for it.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    return isinstance(error, (MemoryError, BudgetError)) or any(words in str(error) for words in OUT_OF_MEMORY)


def has_no_room(error: BaseException) -> bool:
    """Whether memory, disk or processes ran out: the machine's limits, not an error of zerokern."""
    return is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in NO_ROOM)


def cap_between(ours: int, theirs: int, share: float) -> int:
    """A cap above what zerokern needs by a share of what the other needs more.

    >>> cap_between(100, 200, 0.5)
    150
    """
    return ours + round((theirs - ours) * share)


@dataclass(frozen=True)
class Act:
    """A model, its batches and its optimizers; under a memory `cap` where there is one, on `world` processes."""

    shape: Shape
    contenders: tuple[str, ...]
    rows: int
    steps: int
    lr: float
    seconds: float = math.inf
    least: int = 20  # steps that are taken whatever the clock says
    cap: int = 0  # 0: taken from what is measured on this machine
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
        >>> slow.is_over(slow.least - 1, 1e6), slow.is_over(slow.least, 1e6), slow.is_over(slow.least, 0.5)
        (False, True, False)
        """
        return steps >= self.least and elapsed_s > self.seconds

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Act:
        told = json.loads(text)
        return cls(**told | {"shape": Shape(**told["shape"]), "contenders": tuple(told["contenders"])})
