"""The ZeRO-Infinity paper's placement table: each row trains the same model by the same script, with the same losses.

The sum of two ranks has one order, so that all rows have the bits of data parallelism, of torch's own included; but for
3-D parallelism, whose products have other shapes and their sums another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_tiers import Model, batches, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from waiting_device import HostComputes, played
from worlds import World, alone, on_ranks, on_threads, ranked, step_and_zero

import zerokern as zk

STEPS = 4
DISK = "a disk"
ORDER = 5e-6  # what four steps make of sums in another order


class Row(NamedTuple):
    """Where what lies. `played`: on a device, beside which host memory is another tier."""

    stage: int
    params: str = "device"
    state: str = "device"
    played: bool = False


TABLE = {
    "data parallel": Row(0),
    "ZeRO 2": Row(2),
    "ZeRO-Offload": Row(2, state="cpu", played=True),
    "ZeRO 3": Row(3),
    "ZeRO-Inf-CPU": Row(3, "cpu", "cpu", played=True),
    "ZeRO-Inf-NVMe": Row(3, DISK, DISK, played=True),
    "ZeRO-Inf-NVMe, on CPUs": Row(3, DISK, DISK),
}


@contextmanager
def device_of(row: Row) -> Iterator[HostComputes | None]:
    if not row.played:
        yield None
        return
    with played(down_gb_s=1.0, up_gb_s=1.0, poison=True) as device:
        yield device


class Part(nn.Module):
    """A stage of a pipeline, whose blocks tensor parallelism divides: one of two halves."""

    def __init__(self, model: Model, number: int, tp: DeviceMesh) -> None:
        super().__init__()
        self.enter = model.enter if number == 0 else nn.Identity()
        self.blocks = model.blocks[:3] if number == 0 else model.blocks[3:]
        self.leave = model.leave if number == 1 else nn.Identity()
        for block in self.blocks:
            parallelize_module(block, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def script(model: nn.Module, rank: int, opt: torch.optim.Optimizer) -> list[float]:
    """What stays the same."""
    losses = []
    for x in batches(STEPS, rank):
        loss = model(x).square().mean()
        loss.backward()
        step_and_zero(opt)
        losses.append(loss.item())
    return losses


def tier_of(name: str, folder: Path) -> Any:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return zk.Nvme(folder, ring_nbytes="1M") if name == DISK else name


@ranked
def all_rows(world: World, folder: Path, name: str) -> list[float]:
    row = TABLE[name]
    with device_of(row) as device:
        model = model_of()
        for param in model.parameters() if device is not None else ():
            device.own(param)
        world.shard(model, stage=row.stage, tier=tier_of(row.params, folder / "parameters"))
        schedule = "overlap" if row.state != "device" or device is None else "sync"
        tier = tier_of(row.state, folder / f"state-{world.rank}")
        opt = zk.AdamW(model.parameters(), lr=1e-3, tier=tier, schedule=schedule)
        found = script(model, world.rank, opt)
        del model, opt
        return found


@ranked
def by_torch(world: World) -> list[float]:
    model: nn.Module = model_of()
    around = DistributedDataParallel(model) if world.size > 1 else model
    return script(around, world.rank, zk.AdamW(model.parameters(), lr=1e-3))


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    """Of data parallelism by torch, on two ranks, which are processes."""
    return on_ranks(2, by_torch)


def test_each_row(expected: list[list[float]], tmp_path: Path) -> None:
    for name in TABLE:
        assert on_threads(2, all_rows, tmp_path / name, name) == expected, name


def in_three_dimensions(rank: int, sizes: tuple[int, int, int]) -> list[float]:
    """By torch's tensor parallelism and pipelines, and stage 1: losses where the last stage is, else none."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    number, losses = mesh.get_local_rank("pp"), []
    part = zk.shard(Part(model_of(), number, mesh["tp"]), stage=1, mesh=mesh["dp"])
    stage = zk.PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.square().mean())
    opt = zk.AdamW(part.parameters(), lr=1e-3)
    for x in batches(STEPS, mesh.get_local_rank("dp")):
        each: list[Tensor] = []
        _ = schedule.step(target=x, losses=each) if number else schedule.step(x)
        losses += [torch.stack(each).mean().item()] if each else []
        step_and_zero(opt)
    return losses


def test_the_row_of_three_dimensions() -> None:
    first, second, *last = on_ranks(4, in_three_dimensions, (2, 1, 2))
    assert not first and not second and len(last[0]) == STEPS
    (alone_by_torch,) = alone(by_torch)
    for losses in last:
        assert losses == pytest.approx(alone_by_torch, rel=ORDER)
