"""A program of a user, run twice: under zk.shard, and on a plain model whose gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from worlds import World, anywhere, built
from zero_cases import Net, make_adamw, mse, same

import zerokern as zk

__all__ = ["Run", "same_as_plain"]


@dataclass
class Run:
    """What a program gets: `reduce` is nothing under zk.shard, where a backward pass reduces by itself."""

    world: World
    model: nn.Module
    is_plain: bool
    settings: dict[str, Any]  # of its optimizers

    def optimizer(self, params: Iterable | None = None, make: Callable = make_adamw, **more: Any) -> Any:
        settings = {} if self.is_plain else self.settings
        return make(self.model.parameters() if params is None else params, **{**settings, **more})

    def reduce(self) -> None:
        if self.is_plain:
            self.world.average_gradients(self.model.parameters())

    def backward(self, loss: Tensor, **settings: Any) -> None:
        loss.backward(**settings)
        self.reduce()

    def train(self, optimizer: Any, steps: Sequence[int] = (0, 1), model: nn.Module | None = None) -> None:
        for step in steps:
            self.backward(mse(model or self.model, step, self.world))
            optimizer.step()
            optimizer.zero_grad()


def same_as_plain(
    size: int, program: Callable[[Run], Any], build: Callable = Net, optimizer: Any = None, **settings: Any
) -> None:
    """The tensors that the program returns, and the parameters that it leaves, are those of plain data parallelism."""

    def both(world: World) -> None:
        found = []
        for is_plain in (True, False):
            model = built(build)
            run = Run(world, model if is_plain else world.shard(model, **settings), is_plain, optimizer or {})
            seen = program(run)
            with zk.gathered(run.model):
                held = [param.detach().clone() for param in run.model.parameters()]
            found.append([one.detach().clone() for one in seen or ()] + held)
        for place, (theirs, mine) in enumerate(zip(*found, strict=True)):
            same(world.size <= 2, mine, theirs, f"tensor {place}")
        for mine in found[1]:
            assert world.total(mine.clone()).div(world.size).sub(mine).abs().amax() <= 1e-6, "ranks have drifted apart"

    torch.manual_seed(0)
    anywhere(size, both)
