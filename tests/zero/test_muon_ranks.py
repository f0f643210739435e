"""zk.Muon on several ranks, each of which updates its own matrices whole: the bits of ranks that all update all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from worlds import World, built, everywhere, full, refusal, says, step_and_zero

import zerokern as zk
from zerokern.zero.shard import shard_of

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"state_format": "int8"},
    "bf16 parameters": {"dtype": torch.bfloat16},
    "bf16 parameters, bf16 average": {"dtype": torch.bfloat16, "state_format": "bf16"},
}
WIDTH = 32


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, dtype=dtype))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def trained(
    world: World, stage: int, tier: str, schedule: Any, dtype: torch.dtype = torch.float32, **formats: Any
) -> dict[str, torch.Tensor]:
    """The parameters after five steps, of which one is left out."""
    model = built(lambda: Model(dtype))
    names = {name for name, param in model.blocks.named_parameters(prefix="blocks") if param.dim() == 2}
    world.shard(model, stage=stage, whole=["blocks.*.weight"], bucket_bytes=1 << 14)
    if stage:
        held = [shard_of(model.get_parameter(name)).piece.numel() for name in sorted(names)]
        assert set(held) <= {0, 2 * WIDTH * WIDTH}
        assert world.size > 3 or 0 < sum(map(bool, held)) <= 6 // world.size, "each rank has its part of them"
    where = {"tier": tier, "schedule": schedule}
    muon = zk.Muon([p for n, p in model.named_parameters() if n in names], lr=0.02, **where, **formats)
    rest = zk.AdamW([p for n, p in model.named_parameters() if n not in names], lr=1e-2, **where)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(5):
        loss = model(torch.randn(4, 8, generator=generator).to(dtype)).float().square().mean()
        (loss * (float("inf") if step == 2 else 1.0)).backward()
        zk.clip_grad_norm_(model, 1e9)  # whose last bit depends on where matrices are cut; this clips nothing
        for opt in (muon, rest):
            if step != 2:
                opt.step()
            opt.zero_grad()
    for opt in (muon, rest):
        opt.flush()
    return full(model)


def same_as_all(world: World, stage: int, tier: str, schedule: str, kept: str) -> None:
    when = zk.Delayed(after=1) if schedule == "delayed" else schedule
    mine = trained(world, stage, tier, when, **FORMATS[kept])
    theirs = trained(world, 0, tier, when, **FORMATS[kept])
    assert all(value.isfinite().all() for value in mine.values())
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@everywhere(2, tier=["device", "cpu"], schedule=["sync", "overlap", "delayed"], kept=FORMATS)
def test_ranks_that_share_the_matrices_have_the_bits_of_ranks_that_have_all(
    world: World, tier: str, schedule: str, kept: str
) -> None:
    same_as_all(world, 2, tier, schedule, kept)


@pytest.mark.slow
@everywhere(2, tier=["device", "cpu"], schedule=["sync", "overlap", "delayed"], kept=FORMATS)
def test_at_stage_1_ranks_have_these_bits_too(world: World, tier: str, schedule: str, kept: str) -> None:
    same_as_all(world, 1, tier, schedule, kept)


@everywhere(3, stage=[1, 2], kept=["fp32", "int8"])
def test_three_ranks_of_which_some_have_more_matrices(world: World, stage: int, kept: str) -> None:
    same_as_all(world, stage, "device", "sync", kept)


@everywhere(2)
def test_matrices_that_are_cut_are_refused_on_all_ranks(world: World) -> None:
    model = world.shard(built(Model), stage=1, bucket_bytes=1)
    says(refusal(lambda: zk.Muon([block[0].weight for block in model.blocks]), ValueError), ["whole="])


@everywhere(2, stage=[2, 3])
def test_a_matrix_of_one_rank_may_lack_a_gradient_there_beside_those_that_ranks_share(world: World, stage: int) -> None:
    model = built(lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)))
    world.shard(model, stage=stage, whole=list(model.parameters()) if stage == 2 else None)
    own = nn.Parameter(torch.ones(8, 8))
    opt = zk.Muon([*model.parameters(), own], lr=0.1)
    for step in range(4):
        model(torch.ones(2, 16)).square().mean().backward()
        own.grad = torch.eye(8) if step % 2 == world.rank else None
        before = own.detach().clone()
        step_and_zero(opt)
        assert torch.equal(before, own.detach()) == (step % 2 != world.rank)
