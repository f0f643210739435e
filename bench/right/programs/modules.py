"""How modules are put together: shared, repeated, left out, nested, frozen, read from outside."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import IN, OUT, Run, Training
from . import loss, model, program
from .nets import INNER, WIDTH, Block, Net, Tied, some_words


@program()
def the_ordinary_loop(run: Run) -> None:
    run.loop(Net, steps=5)


@loss(Tied)
def tied_head_and_embedding(run: Run, training: Training, step: int) -> Tensor:
    words = some_words(step, run.rank)
    return F.cross_entropy(training(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@model()
def one_weight_in_two_blocks() -> nn.Module:
    net = Net()
    net.blocks[2] = Block(INNER[0])
    net.blocks[2].up.weight = net.blocks[0].up.weight
    return net


@model()
class BlocksRunSeveralTimes(Net):
    def body(self, x: Tensor) -> Tensor:
        for at in (0, 1, 1, 2, 0):
            x = self.blocks[at](x)
        return x


@model()
class OneBlockTwiceInTheList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


@model()
class NetsInANet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets, self.scale = nn.ModuleList(Net(2) for _ in range(2)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.nets[0](x) * self.scale + self.nets[1](x)


@model(unused=True)
class UnusedParametersAndABlock(Net):
    def __init__(self) -> None:
        super().__init__(4)
        self.extra = nn.Linear(5, 5)
        self.blocks[0].extra = nn.Parameter(torch.randn(200))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        return x


class Ordered(Net):
    order: tuple[int, ...] = (0, 1, 2)

    def body(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = self.blocks[at](x)
        return x


@loss(Ordered, steps=4, unused=True)
def blocks_in_another_order_each_step(run: Run, training: Training, step: int) -> Tensor:
    training.module.order = [(0, 1, 2), (2, 0, 1), (1,), (2, 1, 0, 2)][step]
    return run.mse(training, step)


@loss(Ordered, steps=5, unused=True)
def a_depth_that_grows(run: Run, training: Training, step: int) -> Tensor:
    training.module.order = tuple(range(min(step + 1, 3)))
    return run.mse(training, step)


@loss(Ordered, steps=4, unused=True, ranks_differ=True)
def a_block_that_one_rank_leaves_out(run: Run, training: Training, step: int) -> Tensor:
    training.module.order = (0, 1, 2) if (step + run.rank) % 2 else (0, 2)
    return run.mse(training, step)


@loss(Ordered, steps=3, unused=True)
def blocks_that_ranks_run_in_another_order(run: Run, training: Training, step: int) -> Tensor:
    training.module.order = (0, 1, 2) if run.rank else (2, 1, 0)
    return run.mse(training, step)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("left", "right")})

    def forward(self, x: Tensor, choice: str) -> Tensor:
        return x + self.experts[choice](x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.layers = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor, choice: str) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, choice)
        return self.leave(x)


@loss(Experts, steps=4, unused=True, ranks_differ=True)
def experts_that_ranks_choose(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(training(x, "left" if step % 2 == run.rank else "right"), y)


class Routed(nn.Module):
    """Two of four experts for each row; the balance is kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, 24) for _ in range(4))
        self.back = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        odds = self.gate(x).softmax(-1)
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        weight, chosen = odds.topk(2, dim=-1)
        picked = outs.gather(1, chosen[..., None].expand(-1, -1, 24))
        self.balance = odds.mean(0).square().sum()
        return x + self.back((picked * weight[..., None]).sum(1))


class Routing(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))


@loss(Routing)
def a_balance_loss_kept_by_each_layer(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + 0.1 * sum(layer.balance for layer in training.module.blocks)


@model()
class WeightsOfABlockReadByTheRoot(Net):
    def body(self, x: Tensor) -> Tensor:
        y = F.linear(F.linear(x, self.blocks[2].up.weight), self.blocks[2].down.weight)
        return super().body(x) + y


@loss(Net)
def a_head_applied_by_the_loss(run: Run, training: Training, step: int) -> Tensor:
    """Fused losses read the head's weight themselves."""
    x, y = run.data(step)
    weight = training.weight(training.module.leave.weight)
    return F.mse_loss(training(x) + F.linear(x.new_ones(1, WIDTH), weight), y)


@model()
def frozen_in_part() -> nn.Module:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.enter.bias.requires_grad_(False)
    net.blocks[2].up.weight.requires_grad_(False)
    return net


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


@model(issue="TRL #4550")
def lora_on_a_frozen_base() -> nn.Module:
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return net


@dataclasses.dataclass
class State:
    hidden: Tensor
    kept: list[Tensor]


class Wrapping(Block):
    def forward(self, *, state: State) -> State:  # type: ignore[override]
        x = super().forward(state.hidden)
        return State(x, [*state.kept, x])


@model()
class DataclassesBetweenBlocks(Net):
    block = Wrapping

    def body(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            state = block(state=state)
        return state.hidden + state.kept[0]


class Silent(Block):
    def forward(self, state: State) -> None:  # type: ignore[override]
        state.kept.append(state.hidden)
        state.hidden = super().forward(state.hidden)


@model()
class BlocksThatReturnNothing(Net):
    block = Silent

    def body(self, x: Tensor) -> Tensor:
        state = State(x, [])
        for block in self.blocks:
            block(state)
        return state.hidden + state.kept[1]


class Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.up.weight.square().mean() + (self.down.weight @ self.up.weight).square().mean()
        return super().forward(x)


class KeepingNet(Net):
    block = Keeping


@loss(KeepingNet)
def a_penalty_kept_by_each_block(run: Run, training: Training, step: int) -> Tensor:
    return run.mse(training, step) + 0.3 * sum(block.penalty for block in training.module.blocks)


@model()
class Recursion(Net):
    """One block at each node of a tree."""

    def node(self, x: Tensor, depth: int) -> Tensor:
        return self.blocks[depth](x) if depth == 2 else self.blocks[depth](self.node(x, depth + 1) + self.node(-x, 2))

    def body(self, x: Tensor) -> Tensor:
        return self.node(x, 0)


@model()
class FixedPoint(Net):
    """Iterated without a graph, then once with one."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = x
            for _ in range(4):
                z = 0.5 * z + 0.1 * super().body(z)
        return 0.5 * z + 0.1 * super().body(z) + x


@model()
class StraightThrough(Net):
    """Weights are rounded within the forward, and the gradient passes through."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.leave.weight
        coarse = weight + ((weight * 8).round() / 8 - weight).detach()
        return F.linear(self.body(self.enter(x)), coarse, self.leave.bias)


class Deep(Net):
    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        x, outs = self.enter(x), []
        for block in self.blocks:
            x = block(x)
            outs.append(self.leave(x))
        return outs


@loss(Deep)
def one_head_after_each_block(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    return sum(F.mse_loss(out, y) / (1 + at) for at, out in enumerate(training(x)))  # type: ignore[return-value]


class Greedy(Deep):
    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        x, outs = self.enter(x), []
        for block in self.blocks:
            x = block(x.detach())
            outs.append(self.leave(x))
        return outs


@loss(Greedy, unused=True)
def each_layer_learns_from_its_own_loss(run: Run, training: Training, step: int) -> Tensor:
    x, y = run.data(step)
    return sum(F.mse_loss(out, y) for out in training(x))  # type: ignore[return-value]


@model()
class OddParameters(nn.Module):
    """A scalar, lists and dictionaries of parameters, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.matrix, self.rows = nn.Parameter(torch.randn(WIDTH, IN)), nn.ParameterList([torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"out": torch.randn(OUT, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.matrix) * self.scale + self.rows[0] + self.none.sum()
        return F.linear(x / 10, self.named["out"])


@model()
class ScalarsThatAreSummed(Net):
    """Gradients that autograd expands."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.all = nn.Parameter(torch.randn(5, OUT)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows.sum(0) + self.all.sum()


@model()
class OneTinyParameter(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :OUT] * self.scale


@model()
def a_frozen_front() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, IN).requires_grad_(False), Net())
