"""The ZeRO-Infinity paper's placement table: each row trains the same model by the same script, with the same losses.

The sum of two ranks has one order, so that all rows have the bits of data parallelism, of torch's own included. Tensor
parallelism, a part of the row of 3-D parallelism, is in test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_tiers import Model, batches, model_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from waiting_device import Waiting, played
from worlds import World, alone, on_ranks, on_threads, ranked

import zerokern as zk

STEPS = 20
DISK = "a disk"


class Row(NamedTuple):
    """Where what lies. `played`: on a device, beside which host memory is another tier."""

    stage: int
    params: str = "device"
    state: str = "device"
    played: bool = False
    stages: int = 1


TABLE = {
    "data parallel": Row(0),
    "ZeRO 2": Row(2),
    "ZeRO-Offload": Row(2, state="cpu", played=True),
    "3D parallelism": Row(1, stages=2),
    "ZeRO 3": Row(3),
    "ZeRO-Inf-CPU": Row(3, "cpu", "cpu", played=True),
    "ZeRO-Inf-NVMe": Row(3, DISK, DISK, played=True),
    "ZeRO-Inf-NVMe, on CPUs": Row(3, DISK, DISK),
}


@contextmanager
def device_of(row: Row) -> Iterator[Waiting | None]:
    if not row.played:
        yield None
        return
    with played(down_gb_s=1.0, up_gb_s=1.0, poison=True) as device:
        yield device


class Front(nn.Module):
    """The first stage of a pipeline."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.enter, self.blocks = model.enter, model.blocks[:3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Back(nn.Module):
    """The second one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks, self.leave = model.blocks[3:], model.leave

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def script(models: list[nn.Module], rank: int, opts: list[torch.optim.Optimizer]) -> list[float]:
    """What stays the same; the stages of a pipeline hand over what autograd would."""
    losses = []
    for x in batches(STEPS, rank):
        entered: list[Tensor] = []
        left: list[Tensor] = []
        for model in models:
            entered.append(x)
            left.append(model(x))
            x = left[-1].detach().requires_grad_()
        loss = left[-1].square().mean()
        loss.backward()
        for here, following in zip(reversed(left[:-1]), reversed(entered[1:]), strict=True):
            here.backward(following.grad)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


def tier_of(name: str, folder: Path) -> Any:
    return zk.Nvme(folder, ring_nbytes="1M") if name == DISK else name


def by_row(world: World, row: Row, folder: Path, schedule: str) -> list[float]:
    with device_of(row) as device:
        whole = model_of()
        for param in whole.parameters() if device is not None else ():
            device.own(param)
        models = [whole] if row.stages == 1 else [Front(whole), Back(whole)]
        for model in models:
            world.shard(model, stage=row.stage, tier=tier_of(row.params, folder / "parameters"))
        schedule = schedule if row.state != "device" or device is None else "sync"
        tier = tier_of(row.state, folder / f"state-{world.rank}")
        opts = [zk.AdamW(one.parameters(), lr=1e-3, tier=tier, schedule=schedule) for one in models]
        found = script(models, world.rank, opts)
        del models, opts, whole
        return found


@ranked
def by_torch(world: World) -> list[float]:
    model: nn.Module = model_of()
    around = DistributedDataParallel(model) if world.size > 1 else model
    return script([around], world.rank, [zk.AdamW(model.parameters(), lr=1e-3)])


@ranked
def all_rows(world: World, folder: Path, schedule: str, name: str) -> list[float]:
    return by_row(world, TABLE[name], folder, schedule)


RUNS: dict[int, Callable[..., list[Any]]] = {1: lambda *given: alone(*given), 2: lambda *given: on_threads(2, *given)}


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[float]]]:
    """Of data parallelism by torch, on as many ranks, which are processes."""
    return {1: alone(by_torch), 2: on_ranks(2, by_torch)}


@pytest.mark.parametrize("schedule", ["overlap", pytest.param("sync", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", TABLE)
def test_a_row(name: str, size: int, schedule: str, expected: dict[int, Any], tmp_path: Path) -> None:
    assert RUNS[size](all_rows, tmp_path, schedule, name) == expected[size]
