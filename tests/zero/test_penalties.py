"""Losses made of the parameters themselves, beside what they were: EWC, L2-SP, FedProx, averages; plain or sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from worlds import SHARDED, World, anywhere, built, everywhere, full, step_and_zero
from zero_cases import Net, batch, make_adamw, mse, same

import zerokern as zk

Kept = dict[str, dict[str, Tensor]]


def others() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in built(Net, 7).named_parameters()}


def beside_plain(model: nn.Module, kept: Kept) -> Tensor:
    old = kept.setdefault("old", others())
    return sum(
        ((param - old[name]) ** 2).sum() + torch.dist(old[name], param) for name, param in model.named_parameters()
    )


def beside_whole(model: nn.Module, kept: Kept) -> Tensor:
    if "old" not in kept:
        with zk.gathered(model):
            kept["old"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return sum(((kept["old"][name] - param) ** 2).sum() for name, param in model.named_parameters())


def beside_its_own(model: nn.Module, kept: Kept) -> Tensor:
    if "old" not in kept:
        kept["old"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return sum(((param - kept["old"][name]) ** 2).sum() for name, param in model.named_parameters())


def fisher(model: nn.Module, kept: Kept) -> Tensor:
    """`kept` holds parameters and squared gradients of the step before."""
    if "fisher" not in kept:
        return torch.zeros(())
    named = model.named_parameters()
    return sum((kept["fisher"][name] * (param - kept["old"][name]) ** 2).sum() for name, param in named)


def drawn_to(model: nn.Module, kept: Kept) -> Tensor:
    """Without gradients: each rank needs its span alone of the whole tensors."""
    old = kept.setdefault("old", others())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.lerp_(old[name], 0.1)
            param.add_(old[name], alpha=0.1)
    return torch.zeros(())


def follows(world: World, stage: int, loss: Callable[[nn.Module, Kept], Tensor]) -> None:
    model, plain = world.shard(built(Net), stage=stage), built(Net)
    pairs: list[tuple[nn.Module, torch.optim.Optimizer, Kept]] = [
        (one, make_adamw(one.parameters()), {}) for one in (model, plain)
    ]
    for step in range(3):
        losses = []
        for one, optimizer, kept in pairs:
            losses.append(loss(one, kept) + mse(one, step, world))
            losses[-1].backward()
            if one is plain:
                world.average_gradients(plain.parameters())
            if loss is fisher:
                named = list(one.named_parameters())
                kept["fisher"] = {name: param.grad.detach() ** 2 for name, param in named}
                kept["old"] = {name: param.detach().clone() for name, param in named}
            step_and_zero(optimizer)
        torch.testing.assert_close(*losses)
    for (name, mine), theirs in zip(full(model).items(), plain.parameters(), strict=True):
        same(False, mine, theirs.detach(), name)


@pytest.mark.parametrize("loss", [beside_plain, beside_whole, beside_its_own, fisher, drawn_to])
@pytest.mark.parametrize("stage", SHARDED)
def test_penalties(stage: int, loss: Callable) -> None:
    anywhere(2 if stage < 3 else 3, follows, stage, loss)


@everywhere(1, 2, 3)
def test_an_average_of_parts_evaluates(world: World) -> None:
    """An average that is kept sharded, as parameters are, evaluates by functional_call."""
    model, plain = world.shard(built(Net), stage=3), built(Net)
    x, _ = batch(1)
    results = []
    for one in (model, plain):
        average = {name: param.detach().clone() for name, param in one.named_parameters()}
        optimizer = make_adamw(one.parameters())
        for step in range(2):
            mse(one, step, world).backward()
            if one is plain:
                world.average_gradients(plain.parameters())
            step_and_zero(optimizer)
            for name, param in one.named_parameters():
                average[name].lerp_(param.detach(), 0.5)
        with torch.no_grad():
            results.append(functional_call(one, average, (x,)))
    same(world.size <= 2, *results, "with the average")
