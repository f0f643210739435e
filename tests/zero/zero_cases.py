"""Small models with sizes that fit nothing, and each thing that people do with modules as a case to be followed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World, anywhere, built, full, step_and_zero

import zerokern as zk

WIDTH, IN, OUT = 10, 6, 3


class Block(nn.Module):
    def __init__(self, inner: int = 37, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A root with parameters of its own, and units of different sizes."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, width)
        self.blocks = nn.ModuleList(Block(37 + 46 * number, width) for number in range(blocks))
        self.leave = nn.Linear(width, OUT)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.body(self.enter(x)))


def batch(step: int, rank: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, IN, generator=generator), torch.randn(rows, OUT, generator=generator)


def mse(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    return (model(x) - y).square().mean()  # torch before 2.13 has no backward of mse_loss of two dtypes


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it in one step: the loss of step `step` on this rank."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, World], Tensor] = mse
    backward: Callable[[Tensor], Any] = Tensor.backward
    after: Callable[[nn.Module, int], Tensor | None] = lambda model, step: None
    stages: tuple[int, ...] = (1, 2, 3)
    one_order: bool = True  # whether a sum over 2 ranks has the plain order
    steps: int = 3


def make_adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return zk.AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def follow(world: World, case: Case, make: Callable = make_adamw, **settings: Any) -> None:
    """Trains the case sharded, and plain with averaged gradients: the losses, what is read between steps, and the
    parameters at the end must be the same. Up to 2 ranks a sum has one order, so the same means the same bits."""
    exact = world.size <= 1 + case.one_order
    plain = built(case.build)
    ours = copy.deepcopy(plain)
    assert world.shard(ours, **settings) is ours
    pairs = [(ours, make(ours.parameters())), (plain, make(plain.parameters()))]
    for step in range(case.steps):
        losses, seen = [], []
        for model, optimizer in pairs:
            loss = case.loss(model, step, world)
            case.backward(loss)
            if model is plain:
                world.average_gradients(plain.parameters())
            step_and_zero(optimizer)
            losses.append(loss.detach())
            seen.append(case.after(model, step))
        same(exact, losses[0], losses[1], f"{case.name}, loss of step {step}")
        if seen[1] is not None:
            same(exact, seen[0], seen[1], f"{case.name}, seen after step {step}")
    for (name, mine), theirs in zip(full(ours).items(), plain.parameters(), strict=True):
        same(exact, mine, theirs.detach(), f"{case.name}, {name}")


def same(exact: bool, mine: Tensor, theirs: Tensor, what: str) -> None:
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, f"{what}: {mine.shape}, {theirs.shape}"
    if exact:
        assert torch.equal(mine, theirs), f"{what} differs by {(mine - theirs).abs().max():.3g}"
    else:  # each of a handful of SGD steps adds a few roundings of a sum of `size` terms
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}")


def make_sgd(params: Any) -> torch.optim.Optimizer:
    """Continuous in the gradient, unlike Adam's first steps: for sums whose order differs."""
    return zk.SGD(params, lr=0.05, momentum=0.9)


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
            step_and_zero(optimizer)


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
