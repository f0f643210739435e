"""Unusual architectures: weights made of weights, weights handed about, recursion, functions of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from module_cases import layers
from small_programs import Run, loss_program, model_program, program, trained
from torch import Tensor, nn
from torch.nn.utils import parametrize
from zero_cases import IN, OUT, WIDTH, Block, Net


def of_blocks(kind: type, count: int = 3, base: type = Net) -> Any:
    def make() -> nn.Module:
        net = base()
        net.blocks = nn.ModuleList(kind(20 + number) for number in range(count))
        return net

    return make


@loss_program(Net)
def a_loss_of_two_weights_without_a_forward(run: Run, model: nn.Module, step: int) -> Tensor:
    """The modules never run; their weights are read."""
    x, y = run.data(step)
    return F.mse_loss(layers.FusedLinear.apply(F.linear(x, model.enter.weight), model.leave.weight), y)


@loss_program(Net)
def a_fused_head_of_a_units_weight(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return (
        F.mse_loss(model(x), y)
        + layers.FusedLinear.apply(x @ x.t() @ x[:, :1], model.blocks[1].up.weight[:, :1]).mean()
    )


class Squared(Block):
    """Its last layer's weight is computed from one half of a matrix, and kept while a forward lasts."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.square = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.square, "weight", layers.Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + self.square(x) + self.square(self.norm(x))


trained("a_parametrization_cached_while_a_forward_lasts", of_blocks(Squared))


class Double(nn.Module):
    """Two dtypes in one unit, and complex numbers made of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block(20), Block(21)])
        self.turn = nn.Parameter(torch.randn(WIDTH, 2))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.double()).float()
        x = (x * torch.view_as_complex(self.turn)).abs()
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


@program()
def another_dtype_and_complex_views(run: Run) -> None:
    model = run.make(Double)
    model.enter.requires_grad_(False)
    run.train(run.shard(model))


class Handing(nn.Module):
    """A module hands its weight to the next one as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Handed(IN, WIDTH), Handed(WIDTH, WIDTH)])
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.layers[0](x)
        x, second = self.layers[1](x)
        return self.leave(x @ second + first.mean())


class Handed(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.weight


trained("a_weight_as_an_output", Handing)


@program()
def layers_in_a_sequential_and_a_dictionary(run: Run) -> None:
    def make() -> nn.Module:
        body = nn.Sequential(nn.Linear(IN, 20), nn.GELU(), nn.Sequential(nn.Linear(20, WIDTH), nn.PReLU()))
        return nn.Sequential(body, nn.ModuleDict({"a": nn.Linear(WIDTH, OUT), "b": nn.Linear(WIDTH, OUT)}))

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = run.data(step)
        hidden = model[0](x)
        return F.mse_loss(model[1]["a"](hidden) * model[1]["b"](hidden).sigmoid(), y)

    run.train(run.shard(make), loss=loss)


@program()
def units_chosen_by_hand(run: Run) -> None:
    run.train(run.shard(Net, units=lambda module: isinstance(module, nn.Linear)))


class Narrow(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype)).float()


@model_program()
def a_block_in_bfloat16() -> nn.Module:
    net = of_blocks(Narrow)()
    net.blocks[1].to(torch.bfloat16)
    return net
