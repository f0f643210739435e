"""Models whose state is of several records, and optimizers over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload_cases import SCHEDULES, Row, Small, optimizer_of
from torch import nn
from worlds import World
from zero_cases import IN, OUT, Block

from zerokern.io import Nvme

Tier = Callable[..., Nvme]
STEPS = 8


class Wide(Small):
    """State of several records, some of which hold small parameters of the first bucket and of the last."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.enter = nn.Linear(IN, 10)
        self.blocks = nn.ModuleList([Block(307, 10), Block(1203, 10), Block(61, 10)])
        self.leave = nn.Linear(10, OUT)


def row_of(wrap: str, dtype: str, clip: str = "random", **settings: Any) -> Row:
    return Row(wrap, dtype, clip, **{"steps": STEPS, "make": Wide, **settings})


def small(tier: Tier, size: int, **settings: Any) -> list[Nvme]:
    """A folder for each rank; slots are of 4 KiB, so that there are more records than slots."""
    return [tier(ring_nbytes="32K", **settings) for _ in range(size)]


def begun(row: Row, schedule: str, where: Nvme, seed: int = 0) -> tuple[nn.Module, Any]:
    model = row.model(World(0, 1), seed)
    return model, optimizer_of(row, model, tier=where, schedule=SCHEDULES[schedule])


AT_WORK = [("overlap", "stage 3"), ("overlap", "stage 1"), ("delayed", "plain"), ("delayed", "stage 3")]
