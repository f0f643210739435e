"""Layers of torch.nn, and functions of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from ..training import IN, OUT, Run
from . import model, program
from .nets import WIDTH, WORDS, Block, Net


@model()
def a_transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 17, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(IN, 8), nn.Unflatten(0, (1, -1)), encoder, nn.Flatten(0, 1), nn.Linear(8, OUT))


@model()
class LstmAndGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(IN, IN, batch_first=True), nn.GRU(IN, IN, batch_first=True)])
        self.leave = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            x, _ = block(x)
        return self.leave(x[:, -1])


@model()
class CellsUnrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(IN, WIDTH), nn.GRUCell(IN, WIDTH)])
        self.leave = nn.Linear(2 * WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = x.new_zeros(len(x), WIDTH)
        for turn in range(3):
            h, c = self.cells[0](x * turn, (h, c))
            g = self.cells[1](x - turn, g)
        return self.leave(torch.cat([h, g], 1))


@model()
class Convolutions(nn.Module):
    """Down and up again, with what was skipped added."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 1, 2, stride=2)
        self.norm, self.leave = nn.GroupNorm(2, 4), nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 58)).view(-1, 1, 8, 8)
        return self.leave((x + self.up(F.relu(self.norm(self.down(x))))).flatten(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(IN, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x)))


@model()
def batch_norm_in_training() -> nn.Module:
    return Normed()


@model()
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.EmbeddingBag(WORDS, 5)
        self.leave = nn.Linear(WIDTH + 5, OUT)

    def forward(self, x: Tensor) -> Tensor:
        number = (x.abs() * 5).long() % WORDS
        return self.leave(torch.cat([self.words(number).sum(1), self.bags(number)], 1))


@model()
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.leave = nn.Linear(1, 8), nn.Bilinear(8, 8, 5), nn.Linear(5, OUT)
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[..., None])
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.leave(self.mix(x.mean(1), x[:, 0]))


@model()
def old_weight_norm() -> nn.Module:
    net = Net()
    for block in net.blocks:
        weight_norm(block.up)
    return net


@model()
def a_parametrized_weight_norm() -> nn.Module:
    net = Net()
    for block in net.blocks:
        parametrizations.weight_norm(block.up)
    return net


@model()
def an_orthogonal_parametrization() -> nn.Module:
    net = Net()
    parametrizations.orthogonal(net.leave)
    return net


@model()
def old_spectral_norm() -> nn.Module:
    net = Net()
    spectral_norm(net.blocks[0].up)
    return net


@model()
def pruned_weights() -> nn.Module:
    net = Net()
    for block in net.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.4)
    return net


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@model()
def a_parametrization_of_ones_own() -> nn.Module:
    net = Net()
    parametrize.register_parametrization(net.blocks[0].up, "weight", Symmetric())
    return net


class FusedLinear(torch.autograd.Function):
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


@model()
class AFunctionOfOnesOwn(Net):
    block = Fused


class KeptInContext(torch.autograd.Function):
    """Keeps its weight without telling autograd, as some kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class FusedInContext(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + KeptInContext.apply(F.gelu(self.up(self.norm(x))), self.down.weight)


@model()
class AWeightKeptInAContext(Net):
    block = FusedInContext


@model()
class AHypernetwork(nn.Module):
    """One network writes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.writer = nn.Parameter(torch.randn(4)), nn.Linear(4, OUT * IN)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.writer(self.code).view(OUT, IN))


@model()
class ATransposedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.leave = nn.ModuleList([nn.Linear(IN, WIDTH), nn.Linear(WIDTH, 7)]), nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in reversed(self.layers):
            x = F.linear(x, layer.weight.t())
        return self.leave(x)


@model()
class ComplexNumbers(Net):
    """Gradients that autograd hands over as conjugated views."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(2, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        turned = torch.complex(self.turn[0], self.turn[1]).conj()
        return super().body(x) + (turned * x).imag


@program(narrow=True)
def bf16_beside_exact_masters(run: Run) -> None:
    run.loop(Net, steps=4, narrow=True)


@program(narrow=True)
def bf16_and_clipping(run: Run) -> None:
    run.loop(Net, steps=4, narrow=True, clip=0.3)


@program(narrow=True)
def bf16_and_accumulation(run: Run) -> None:
    run.loop(Net, steps=3, narrow=True, accumulate=3)


@program()
def dropout_seeded_alike(run: Run) -> None:
    net = run.make(Net)
    net.blocks.append(nn.Dropout(0.3))
    training = run.train(net)
    for step in range(3):
        torch.manual_seed(step)
        run.follow(training, run.mse(training, step))
