"""Every optimizer and every format of its state, over shards: the bits of the same optimizer over whole tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from worlds import SHARDED, STAGES, World, built, everywhere, full, on_ranks, ranked
from zero_cases import Case, Net, batch, follow, mse

import zerokern as zk

MASTERS = [(state, master) for state in ("fp32", "bf16", "int8") for master in ("split16", "split8", "fp32", "none")]


def bf16_mse(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    return F.mse_loss(model(x.bfloat16()).float(), y)


@everywhere(2, stage=[3])
def test_bf16_parameters_with_every_master(world: World, stage: int) -> None:
    """Cuts fall on blocks of 128 from a parameter's element 0, so that int8 scales too are those of the whole."""
    for state, master in MASTERS:
        case = Case(f"{state}, {master}", lambda: Net().bfloat16(), bf16_mse)
        follow(
            world,
            case,
            stage=stage,
            make=lambda params, state=state, master=master: zk.AdamW(
                params, lr=1e-2, state_format=state, master_format=master
            ),
        )


@everywhere(1, 2, stage=STAGES)
def test_two_optimizers_over_one_model(world: World, stage: int) -> None:
    """Two optimizers over one model, clipped together and apart, groups added late, learning rates that change."""
    results = []
    for model in (world.shard(built(Net), stage=stage), built(Net)):
        inner = zk.AdamW(model.blocks.parameters(), lr=1e-2)
        outer = zk.SGD(model.enter.parameters(), lr=1e-1, momentum=0.9)
        schedulers = [LambdaLR(one, lambda step: 1 / (1 + step)) for one in (inner, outer)]
        for step in range(4):
            mse(model, step, world).backward()
            clip = zk.clip_grad_norm_
            if isinstance(model.leave.weight.grad, Tensor) and results:
                world.average_gradients(model.parameters())
            if step == 1:
                clip(model, 0.05)
            if step == 2:
                clip(list(model.blocks.parameters()), 0.01)
                outer.add_param_group({"params": list(model.leave.parameters()), "lr": 0.05})
            for one in (inner, outer):
                one.step()
            for one in schedulers[: 1 if step >= 2 else 2]:
                one.step()
            model.zero_grad()
        results.append(full(model) if not results else dict(model.named_parameters()))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name].detach(), rtol=1e-6, atol=1e-7, msg=name)


@everywhere(2, stage=SHARDED)
def test_a_clip_whose_gradients_are_dropped(world: World, stage: int) -> None:
    """A factor belongs to the gradients that it was computed of: it goes when they do."""
    ours, twin = world.shard(built(Net), stage=stage), world.shard(built(Net), stage=stage)
    mse(ours, 5, world).backward()
    zk.clip_grad_norm_(ours, 1e-3)
    ours.zero_grad()
    for model in (ours, twin):
        optimizer = zk.SGD(model.parameters(), lr=0.1)
        mse(model, 0, world).backward()
        optimizer.step()
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(ours).items())


@ranked
def on_real_ranks(world: World) -> None:
    for stage in (2, 3):
        test_two_optimizers_over_one_model(world, stage)


def test_optimizers_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
