"""Models whose state is of several records, and optimizers over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from offload_cases import (
    SCHEDULES,
    Row,
    Small,
    optimizer_of,
)
from torch import nn
from worlds import World
from zero_cases import IN, OUT, Block

import zerokern as zk
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


def kept_of(optimizer: Any) -> dict[str, Any]:
    """A state_dict with memory of its own, of what ranks have of it."""
    state = optimizer.state_dict()
    entries = {number: {key: value.clone() for key, value in entry.items()} for number, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": copy.deepcopy(state["param_groups"])}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with zk.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


AT_WORK = [("overlap", "stage 3"), ("overlap", "stage 1"), ("delayed", "plain"), ("delayed", "stage 3")]
