"""Blocks that do less or more than return their output: left out, chosen by a gate, keeping a loss or a weight."""

from __future__ import annotations

import torch
from small_programs import RANKS_DIFFER, Run, loss_program, model_program, program
from torch import Tensor, nn
from zero_cases import IN, OUT, WIDTH, Block, Net


class Dropping(Net):
    """Stochastic depth: a block that is left out returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped(20 + number) for number in range(3))


class Dropped(Block):
    left_out = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.left_out else super().forward(x)


@program()
def stochastic_depth(run: Run) -> None:
    model = run.shard(Dropping)

    def loss(model: nn.Module, step: int) -> Tensor:
        for number, block in enumerate(model.blocks):
            block.left_out = (number + step) % 3 == 0
        return run.mse(model, step)

    run.train(model, 4, loss)


@program(refused=RANKS_DIFFER)
def stochastic_depth_of_each_rank(run: Run) -> None:
    drop_on_each_rank(run, run.shard(Dropping))


@program()
def stochastic_depth_of_each_rank_within_a_unit(run: Run) -> None:
    drop_on_each_rank(run, run.shard(Dropping, units=[]))


def drop_on_each_rank(run: Run, model: nn.Module) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        for number, block in enumerate(model.blocks):
            block.left_out = (number + step + run.rank) % 3 == 0
        return run.mse(model, step)

    run.train(model, 4, loss)


class EarlyExit(Net):
    """Each block says whether it is the last; those behind it do nothing."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Exiting(20 + number) for number in range(3))

    def body(self, x: Tensor) -> Tensor:
        done = False
        for number, block in enumerate(self.blocks):
            x, done = block(x, done or number >= self.depth)
        return x


class Exiting(Block):
    def forward(self, x: Tensor, done: bool) -> tuple[Tensor, bool]:
        return (x, done) if done else (super().forward(x), done)


@loss_program(EarlyExit, steps=4)
def early_exit(run: Run, model: nn.Module, step: int) -> Tensor:
    model.depth = step % 3 + 1
    return run.mse(model, step)


class Routed(nn.Module):
    """Experts in one ModuleList, two of which are chosen for each row; the balance is kept as an attribute."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        odds = self.gate(x).softmax(-1)
        weight, chosen = odds.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, which, None] * expert(x[rows]))
        self.balance = (odds.mean(0) ** 2).sum() * len(self.experts)
        return x + out


class Routing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.layers = nn.ModuleList(Routed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def balanced(run: Run, model: nn.Module, step: int) -> Tensor:
    return run.mse(model, step) + 0.1 * sum(layer.balance for layer in model.layers)


def whole_layers(model: nn.Module) -> list[nn.Module]:
    return list(model.layers)


@program()
def mixture_of_experts_with_a_stored_loss(run: Run) -> None:
    model = run.make(Routing)
    run.train(run.shard(model, units=whole_layers(model)), 4, lambda model, step: balanced(run, model, step))


@program(refused=RANKS_DIFFER)
def experts_that_are_units_of_their_own(run: Run) -> None:
    run.train(run.shard(Routing), 4, lambda model, step: balanced(run, model, step))


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up.weight
        return super().forward(x)


@program()
def a_weight_kept_by_its_module_and_used_later(run: Run) -> None:
    def make() -> Net:
        net = Net()
        net.blocks = nn.ModuleList(Keeping(30 + number) for number in range(3))
        return net

    def loss(model: nn.Module, step: int) -> Tensor:
        return run.mse(model, step) + model.blocks[0].kept.square().mean()

    run.train(run.shard(make), loss=loss)


class MeasuredInNumPy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(self.up.weight.detach().numpy().mean()))


@model_program()
def weights_read_in_numpy_within_the_forward() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(MeasuredInNumPy(20 + number) for number in range(3))
    return net
