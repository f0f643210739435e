"""Clipping by the global norm: one number for all ranks, torch's semantics, at every stage."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from worlds import STAGES, World, built, everywhere, full, on_ranks, ranked, refusal, says
from zero_cases import Net, make_adamw, make_sgd, mse

import zerokern as zk


def pair(world: World, stage: int, step: int = 0) -> tuple[nn.Module, nn.Module]:
    """A sharded and a plain model after the same backward."""
    ours, plain = world.shard(built(Net), stage=stage), built(Net)
    for model in (ours, plain):
        mse(model, step, world).backward()
    world.average_gradients(plain.parameters())
    return ours, plain


@everywhere(1, 3, stage=STAGES, norm_type=[2.0, math.inf])
def test_as_torch_clips_plain_gradients(world: World, stage: int, norm_type: float) -> None:
    for max_norm in (0.01, 1e6):
        ours, plain = pair(world, stage)
        optimizers = [make_sgd(ours.parameters()), make_sgd(plain.parameters())]
        given = ours if max_norm < 1 else list(ours.parameters())
        found = zk.clip_grad_norm_(given, max_norm, norm_type)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        assert isinstance(found, Tensor) and found.ndim == 0
        assert float(found) == pytest.approx(float(wanted), rel=1e-6)
        assert len(set(world.exchange(float(found)))) == 1, "all ranks have the same number"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-7, msg=name)
        # the factor is spent: the next step has none
        for model in (ours, plain):
            mse(model, 1, world).backward()
        world.average_gradients(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)


@everywhere(1, 3, stage=STAGES)
def test_the_norm_of_the_optimizer(world: World, stage: int) -> None:
    """Inside of the optimizer: summed in float64, so that only the rounding of the mean can differ."""
    ours, plain = pair(world, stage)
    optimizers = [make_adamw(model.parameters(), max_grad_norm=0.02) for model in (ours, plain)]
    for optimizer in optimizers:
        optimizer.step()
    norms = [float(optimizer.grad_norm) for optimizer in optimizers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-13 if world.size <= 2 else 1e-6)
    assert len(set(world.exchange(norms[0]))) == 1
    for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7, msg=name)


@everywhere(1, 2, stage=STAGES)
def test_what_cannot_be_clipped(world: World, stage: int) -> None:
    ours, _ = pair(world, stage)
    if stage:
        message = refusal(lambda: nn.utils.clip_grad_norm_(ours.parameters(), 1.0), TypeError)
        says(message, ["zk.clip_grad_norm_"])
        says(refusal(lambda: nn.utils.get_total_norm([p.grad for p in ours.parameters()]), TypeError), ["zk.clip"])
        says(refusal(lambda: zk.clip_grad_norm_(ours, 1.0, 3.0), ValueError), ["norm_type", "3.0"])
    for param in ours.parameters():
        param.grad.mul_(math.nan)
    message = refusal(lambda: zk.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True), RuntimeError)
    says(message, ["norm", "error_if_nonfinite"])
    assert math.isnan(zk.clip_grad_norm_(ours, 1.0))
    ours.zero_grad()
    assert float(zk.clip_grad_norm_(ours, 1.0)) == 0.0


@ranked
def on_real_ranks(world: World) -> None:
    for stage in (0, 2, 3):
        test_as_torch_clips_plain_gradients(world, stage, 2.0)
        test_the_norm_of_the_optimizer(world, stage)
        test_what_cannot_be_clipped(world, stage)


def test_clipping_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)
