"""Losses made of the parameters themselves, beside what they were: EWC, L2-SP, FedProx, averages; plain or sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from worlds import World, built, full, on_threads, step_and_zero
from zero_cases import Net, make_adamw, mse, same

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
    for step in range(2):
        losses = []
        for one, optimizer, kept in pairs:
            losses.append(loss(one, kept) + mse(one, step, world))
            losses[-1].backward()
            if one is plain:
                world.average_gradients(plain.parameters())
            step_and_zero(optimizer)
        torch.testing.assert_close(*losses)
    for (name, mine), theirs in zip(full(model).items(), plain.parameters(), strict=True):
        same(False, mine, theirs.detach(), name)


@pytest.mark.parametrize(
    "stage, loss", [(3, beside_plain), (1, beside_whole), (3, beside_whole), (2, drawn_to), (3, drawn_to)]
)
def test_penalties(stage: int, loss: Callable) -> None:
    """tests/conformance has more of them."""
    on_threads(2, follows, stage, loss)
