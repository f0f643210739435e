"""zk.Muon over meshes of (replicate, shard): the bits of stage 0, state saved once, and resumed in other layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_cases import folder_nbytes, laid_out, traffic_of
from torch import nn
from worlds import World, built, full, on_ranks, ranked, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.zero.shard import shard_of

WIDTH = 32
MATRIX = 2 * WIDTH * WIDTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def begun(world: World, stage: int, seed: int = 0, **where: Any) -> tuple[nn.Module, list[Any]]:
    model = built(Model, seed)
    matrices, rest = zk.muon_groups(model)
    world.shard(model, stage=stage, whole=matrices if stage < 3 else None)
    return model, [zk.Muon(matrices, lr=0.02, **where), zk.AdamW(rest, lr=1e-2, **where)]


def train(world: World, model: nn.Module, opts: list[Any], steps: range) -> None:
    """Each rank's gradients are its number times the same whole numbers, so that sums have one value in any order."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        factor, terms = world.rank + 1.0, []
        for param in model.parameters():
            terms.append((param * torch.randint(-3, 4, param.shape, generator=generator)).sum())
        (torch.stack(terms).sum() * factor + 0.0 * model(torch.zeros(1, 8)).sum()).backward()
        step_and_zero(*opts)
    for opt in opts:
        opt.flush()


def traffic(act: Callable[[], object], model: nn.Module) -> float:
    """Bytes that it sends, along both dimensions."""
    before = sum(traffic_of(sharding_of(model).group)[:2])
    act()
    return sum(traffic_of(sharding_of(model).group)[:2]) - before


def same(mine: nn.Module, theirs: nn.Module) -> None:
    found = full(theirs)
    assert not [name for name, value in full(mine).items() if not torch.equal(value, found[name])]


@ranked
def work(world: World, folder: str) -> None:
    two = laid_out(world, (2, 2))
    plain, opts = begun(two, 0)
    train(two, plain, opts, range(3))
    for stage in (1, 2):
        for number, where in enumerate(({}, {"tier": "cpu", "schedule": "overlap"}, {"schedule": zk.Delayed(after=1)})):
            model = two.shard(built(Model), stage=stage)
            adamw = zk.AdamW(model.parameters(), **where)
            cut = traffic(lambda: train(two, model, [adamw], range(3)), model)  # noqa: B023
            model, ours = begun(two, stage, **where)
            held = [shard_of(param).piece.numel() for name, param in model.named_parameters() if ".weight" in name]
            assert held.count(MATRIX) == 3, "half of six matrices, on each replica"
            sent = traffic(lambda: train(two, model, ours, range(3)), model)  # noqa: B023
            assert sent <= 1.02 * cut, (stage, where, sent / cut)
            same(model, plain)
            zk.save(f"{folder}/{stage}.{number}", model, ours)
    zk.save(f"{folder}/plain", plain, opts)
    train(two, plain, opts, range(3, 5))
    one, other = laid_out(world, (4,), ("dp",)), laid_out(world, (4, 1))
    for name in ("1.0", "2.1", "2.2"):
        for place, stage in ((one, 2), (other, 1), (two, 0), (two, 1)):
            fresh, again = begun(place, stage, seed=5)
            zk.load(f"{folder}/{name}", fresh, again)
            train(place, fresh, again, range(3, 5))
            same(fresh, plain)


@pytest.mark.slow
def test_the_bits_of_stage_0_and_one_copy_of_the_state(tmp_path: Path) -> None:
    on_ranks(4, work, str(tmp_path))
    once = folder_nbytes(tmp_path / "plain")
    for name in ("1.0", "2.0", "2.1"):
        assert folder_nbytes(tmp_path / name) < 1.1 * once
