"""Rules, groups, rates and clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..training import Run
from . import program
from .nets import Net


@program()
def sgd_with_momentum(run: Run) -> None:
    run.loop(Net, steps=4, rule="sgd", lr=0.05, weight_decay=0.01)


@program()
def clipped_by_the_global_norm(run: Run) -> None:
    run.loop(Net, steps=4, clip=0.1)


@program()
def clipped_sgd(run: Run) -> None:
    run.loop(Net, steps=4, rule="sgd", lr=0.05, clip=0.1)


@program()
def a_norm_that_clips_nothing(run: Run) -> None:
    run.loop(Net, steps=3, clip=1e9)


@program()
def no_weight_decay(run: Run) -> None:
    run.loop(Net, steps=3, weight_decay=0.0)


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices, rest = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]


@program()
def groups_with_and_without_decay(run: Run) -> None:
    run.loop(Net, steps=4, groups=by_dimension)


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    groups = [{"params": list(block.parameters()), "lr": 1e-2 * 0.7**at} for at, block in enumerate(model.blocks)]
    return [*groups, {"params": [*model.enter.parameters(), *model.leave.parameters()]}]


@program()
def a_rate_for_each_layer(run: Run) -> None:
    run.loop(Net, steps=4, groups=by_layer)


@program()
def groups_and_clipping(run: Run) -> None:
    run.loop(Net, steps=4, groups=by_layer, clip=0.1)


@program()
def a_rate_that_changes_each_step(run: Run) -> None:
    training = run.train(Net)
    for step in range(4):
        training.set_lr(1e-2 / (1 + step))
        run.follow(training, run.mse(training, step))


@program()
def a_rate_of_zero(run: Run) -> None:
    training = run.train(Net)
    for step in range(4):
        training.set_lr(1e-2 * (step % 2))
        run.follow(training, run.mse(training, step))


@program()
def many_steps(run: Run) -> None:
    run.loop(lambda: Net(2), steps=12, lr=1e-3)


@program()
def gradients_of_very_different_sizes(run: Run) -> None:
    net = run.make(Net)
    with torch.no_grad():
        net.leave.weight.mul_(100)
        net.enter.weight.mul_(0.01)
    run.loop(net, steps=3, rule="sgd", lr=1e-4)
