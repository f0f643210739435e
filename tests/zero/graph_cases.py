"""Programs whose graphs no list of outputs shows: what is read in backward is found where it is read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worlds import World
from zero_cases import WIDTH, Block, Case, Net, batch, mse


class Routed(Block):
    """A mixture's block: its auxiliary loss is an attribute, made after the output."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = F.linear(self.gate(y).softmax(-1), self.gate.weight.t()).square().mean()
        return y


def mixture() -> Net:
    net = Net()
    net.blocks = nn.ModuleList(Routed(30 + 7 * number) for number in range(4))
    return net


def with_aux(model: nn.Module, step: int, world: World) -> Tensor:
    loss = mse(model, step, world)
    return loss + sum(0.1 * block.aux for block in model.blocks)


def aux_alone(model: nn.Module, step: int, world: World) -> Tensor:
    """The outputs' part of the graph takes no part in backward at all."""
    mse(model, step, world)
    return model.blocks[2].aux + model.blocks[0].aux


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(Block):
    def forward(self, x: Tensor | Opaque) -> Opaque:
        return Opaque(super().forward(x.value if isinstance(x, Opaque) else x))


class Hidden(Net):
    """Units that hand on objects in which nobody finds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hiding(20 + 5 * number) for number in range(3))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x).value


class Dripping(Block):
    """A generator: the unit's forward is over before any of it has run."""

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = super().forward(x)
            yield x


class Dripped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dripping(20 + 5 * number) for number in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = sum(block(x))
        return x


class InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.t()
        ctx.save_for_backward(2 / y.numel() * y @ weight, 2 / y.numel() * y.t() @ x)
        return y.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * one for one in ctx.saved_tensors)


def in_forward(model: nn.Module, step: int, world: World) -> Tensor:
    """After the forward, as fused losses are called, with a weight of a unit."""
    x, y = batch(step, world.rank)
    out = model(x)
    return InForward.apply(y.repeat(1, 4)[:, :WIDTH] * out.mean(), model.blocks[1].up.weight) + F.mse_loss(out, y)


class Checked(Net):
    """Hooks of saved tensors that are not ours, inside of units and around them."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda kept: kept):
            x = self.blocks[0](x)
        with torch.autograd.graph.save_on_cpu():
            x = self.blocks[1](x)
        return self.blocks[2](x)


class OnCPUInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def on_cpu_inside() -> Net:
    net = Net()
    net.blocks = nn.ModuleList(OnCPUInside(20 + 5 * number) for number in range(3))
    return net


def by_module_hooks(model: nn.Module, step: int, world: World) -> Tensor:
    """They begin after ours and end after ours, since the hooks are registered after those of the wrapper."""
    x, y = batch(step, world.rank)
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda kept: kept)
    handles = [
        model.register_forward_pre_hook(lambda *_: theirs.__enter__()),
        model.register_forward_hook(lambda *_: theirs.__exit__()),
    ]
    out = model(x)
    for handle in handles:
        handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks stay in force after a forward"
    return F.mse_loss(out, y)


CASES = [
    Case("auxiliary losses as attributes", mixture, with_aux),
    Case("auxiliary losses alone", mixture, aux_alone),
    Case("opaque results", Hidden),
    Case("generators", Dripped),
    # at stage 3 a small bucket may be reduced before the other gradient of the weight is there
    Case("a Function that makes gradients in forward", Net, in_forward, one_order=False),
    Case("hooks of others around units", Checked, by_module_hooks),
    Case("hooks of others inside of units", on_cpu_inside),
]
