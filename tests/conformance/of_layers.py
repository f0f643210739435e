"""Unusual architectures: weights made of weights, weights handed about, recursion, functions of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from small_programs import Run, loss_program, model_program, program, trained
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, spectral_norm
from zero_cases import IN, OUT, WIDTH, Block, Net


class FusedLinear(torch.autograd.Function):
    """A linear layer and its backward, as fused kernels write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Fused(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + FusedLinear.apply(F.gelu(self.up(self.norm(x))), self.down.weight)


def of_blocks(kind: type, count: int = 3, base: type = Net) -> Any:
    def make() -> nn.Module:
        net = base()
        net.blocks = nn.ModuleList(kind(20 + number) for number in range(count))
        return net

    return make


trained("a_function_of_ones_own", of_blocks(Fused))


@loss_program(Net)
def a_loss_of_two_weights_without_a_forward(run: Run, model: nn.Module, step: int) -> Tensor:
    """The modules never run; their weights are read."""
    x, y = run.data(step)
    return F.mse_loss(FusedLinear.apply(F.linear(x, model.enter.weight), model.leave.weight), y)


class Headless(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.enter(x))


@loss_program(Headless)
def a_fused_head_after_the_forward(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(FusedLinear.apply(model(x), model.leave.weight), y)


@loss_program(Net)
def a_fused_head_of_a_units_weight(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return F.mse_loss(model(x), y) + FusedLinear.apply(x @ x.t() @ x[:, :1], model.blocks[1].up.weight[:, :1]).mean()


class Hyper(nn.Module):
    """One network writes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.ParameterList([torch.randn(4) for _ in range(2)])
        self.writers = nn.ModuleList([nn.Linear(4, WIDTH * IN), nn.Linear(4, OUT * WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (write(code) for write, code in zip(self.writers, self.codes, strict=True))
        return F.linear(F.gelu(F.linear(x, first.view(WIDTH, IN))), second.view(OUT, WIDTH))


trained("a_hypernetwork", Hyper)


class AutoEncoder(nn.Module):
    """The decoder is the encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(IN, 23), nn.Linear(23, 7)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers):
            x = F.linear(x, layer.weight.t())
        return x


trained(
    "an_auto_encoder_with_transposed_weights",
    AutoEncoder,
    lambda run, model, step: F.mse_loss(model(run.data(step)[0]), run.data(step)[0]),
)


@loss_program(Net)
def siamese_twins(run: Run, model: nn.Module, step: int) -> Tensor:
    a, b = model(run.data(step)[0]), model(run.data(step + 40)[0])
    return F.cosine_embedding_loss(a, b, torch.tensor([1.0, -1.0, 1.0, -1.0])) + run.mse(model, step)


class Tree(nn.Module):
    """A recursive network: one unit at each node, the depth of the tree that of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), nn.Linear(1, WIDTH)])
        self.leave = nn.Linear(WIDTH, OUT)

    def node(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return self.units[1](x)
        middle = x.shape[1] // 2
        return torch.tanh(self.units[0](torch.cat([self.node(x[:, :middle]), self.node(x[:, middle:])], 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.node(x))


trained("a_recursive_network", Tree)


class Equilibrium(Net):
    """Iterated without a graph to a fixed point, then once with one."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = x
            for _ in range(4):
                z = 0.5 * z + 0.1 * super().body(z)
        return 0.5 * z + 0.1 * super().body(z) + x


trained("a_deep_equilibrium", Equilibrium)


@model_program()
def pruned_weights() -> nn.Module:
    net = Net()
    for block in net.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.4)
    return net


@program()
def old_spectral_norm(run: Run) -> None:
    def make() -> nn.Module:
        net = Net()
        for block in net.blocks:
            spectral_norm(block.up)
        return net

    model = run.shard(make)
    run.train(model)
    run.see(*model.buffers())


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Squared(Block):
    """Its last layer's weight is computed from one half of a matrix, and kept while a forward lasts."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.square = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.square, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + self.square(x) + self.square(self.norm(x))


trained("a_parametrization_of_ones_own", of_blocks(Squared))


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


@program()
def negated_and_conjugated_gradients(run: Run) -> None:
    """Gradients that autograd hands over as lazily negated or conjugated views."""

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(2, WIDTH))

        def body(self, x: Tensor) -> Tensor:
            turned = torch.complex(self.turn[0], self.turn[1]).conj()
            return super().body(x) + (turned * x).imag + self.turn[1]

    run.train(run.shard(Turned))


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


class Deep(nn.Module):
    """Supervised after each block, by one head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList(Block(20 + number) for number in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, outs = self.enter(x), []
        for block in self.blocks:
            x = block(x)
            outs.append(self.head(x))
        return outs


@loss_program(Deep)
def deep_supervision(run: Run, model: nn.Module, step: int) -> Tensor:
    x, y = run.data(step)
    return sum(F.mse_loss(out, y) / (1 + depth) for depth, out in enumerate(model(x)))


class Detached(Deep):
    def forward(self, x: Tensor) -> list[Tensor]:
        x, outs = self.enter(x), []
        for block in self.blocks:
            x = block(x.detach())
            outs.append(self.head(x))
        return outs


@loss_program(Detached)
def greedy_training_of_each_layer(run: Run, model: nn.Module, step: int) -> Tensor:
    """Each block learns from its own loss; nothing flows back from one to the one before."""
    x, y = run.data(step)
    return sum(F.mse_loss(out, y) for out in model(x))


class Straight(Net):
    """Quantized weights in forward, the gradient straight through."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            coarse = block.up.weight + ((block.up.weight * 8).round() / 8 - block.up.weight).detach()
            x = x + block.down(F.gelu(F.linear(block.norm(x), coarse, block.up.bias)))
        return x


trained("quantization_with_a_straight_through_gradient", Straight)


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
