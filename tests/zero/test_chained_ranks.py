"""A chain of Muon and AdamW on several ranks: the bits of both by hand, and one decision for all ranks and rules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from worlds import World, built, everywhere, full

import zerokern as zk

WIDTH = 32


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return x


def optimizers(model: nn.Module, **where: Any) -> list[Any]:
    matrices, rest = zk.muon_groups(model)
    return [zk.Muon(matrices, lr=0.02, **where), zk.AdamW(rest, lr=1e-2, **where)]


def loss_of(model: nn.Module, world: World, step: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(world.rank + 10 * step)
    return model(torch.randn(4, 8, generator=rng)).square().sum()


def sharded(world: World, stage: int) -> nn.Module:
    model = built(Blocks)
    return world.shard(
        model, stage=stage, whole=zk.muon_groups(model)[0] if stage in (1, 2) else [], bucket_bytes=1 << 14
    )


@everywhere(2, stage=[0, 1, 2, 3], tier=["device", "cpu"], schedule=["sync", "overlap", "delayed"])
def test_by_hand_and_in_a_chain(world: World, stage: int, tier: str, schedule: str) -> None:
    """Accumulated twice at stage 1."""
    where = {"tier": tier, "schedule": zk.Delayed(after=1) if schedule == "delayed" else schedule}
    model, other = sharded(world, stage), sharded(world, stage)
    chain = zk.ChainedOptimizer(optimizers(model, **where), max_grad_norm=0.5)
    opts = optimizers(other, **where)
    params = [param for opt in opts for group in opt.param_groups for param in group["params"]]
    for step in range(4):
        for part in range(1 + (stage == 1)):
            loss_of(model, world, 7 * part + step).backward()
            loss_of(other, world, 7 * part + step).backward()
        chain.step()
        norm = zk.clip_grad_norm_(params, 0.5)
        assert chain.grad_norm == norm.item() > 0.5
        for opt in opts:
            opt.step()
        for opt in (chain, *opts):
            opt.zero_grad()
    for opt in (chain, *opts):
        opt.flush()
    theirs = full(other)
    for name, value in full(model).items():
        assert torch.equal(value, theirs[name]), name


@everywhere(
    2, stage=[0, 1, 2, 3], tier=["device", "cpu"], where=["enter.bias", "blocks.3.weight"], how=["loss", "scaler"]
)
def test_one_rank_breaks_one_rule_and_nothing_changes_anywhere(
    world: World, stage: int, tier: str, where: str, how: str
) -> None:
    model = sharded(world, stage)
    chain = zk.ChainedOptimizer(optimizers(model, tier=tier))  # without max_grad_norm
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=how == "scaler")
    for step in range(3):
        before = full(model)
        broken = step == 1 and world.rank == 1
        loss = loss_of(model, world, step)
        scaler.scale(loss + model.get_parameter(where).sum() * (math.inf if broken else 0.0)).backward()
        scaler.step(chain)
        scaler.update()
        chain.zero_grad()
        same = [name for name, value in full(model).items() if torch.equal(value, before[name])]
        assert len(same) == (10 if step == 1 else 0), same
    assert chain.skipped_steps == 1
    assert all(value.isfinite().all() for value in full(model).values())
