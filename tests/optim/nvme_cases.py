"""Models whose state is of several records, and optimizers over them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from offload_cases import SCHEDULES, Row, Small, optimizer_of
from optim_cases import Twins, copies, set_grads
from torch import nn
from worlds import World
from zero_cases import IN, OUT, Block

import zerokern as zk
from zerokern.io import Nvme

Tier = Callable[..., Nvme]
STEPS = 8
READ, WRITE = 1, 2


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


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow, or be written, beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def assert_torn(twins: Twins, failed: pytest.ExceptionInfo[zk.IoError]) -> None:
    assert "checkpoint" in str(failed.value)
    for refused in (twins.ours.step, twins.ours.state_dict):
        with pytest.raises(zk.StateError, match=r"broken off.*load_state_dict"):
            refused()


def heal(twins: Twins) -> None:
    """As a user does: the model first, then its optimizer."""
    for param, value in zip(twins.params, copies(twins.straight), strict=True):
        param.detach().copy_(value)
    twins.ours.load_state_dict(twins.reference.state_dict())


def step_ours(twins: Twins, seed: int) -> None:
    set_grads(twins.params, seed=seed)
    twins.ours.step()


def step_reference(twins: Twins, seed: int) -> None:
    set_grads(twins.straight, seed=seed)
    twins.reference.step()
