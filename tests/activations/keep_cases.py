"""Layers whose inputs are large enough to move, a step of them, and a played device that they lie on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import waiting_device
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerokern.activations import keeping
from zerokern.activations.recompute import recompute_with
from zerokern.examples.played_device import PlayedDevice

WIDTH, ROWS = 64, 4096  # 1 MiB


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        self.calls += 1
        y = F.dropout(self.down(F.gelu(self.up(x))), self.dropout)
        return x + (y if scale is None else y * scale["by"][0])


def layers(count: int = 4, **settings: Any) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(Layer(**settings) for _ in range(count))


def batch(rows: int = ROWS, seed: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, run: Callable[..., Tensor], x: Tensor, **kwargs: Any) -> list[Tensor]:
    """The loss of a step, and all gradients; dropout draws the same each time."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    model.zero_grad()
    hidden = x * 1.0
    for layer in model:
        hidden = run(layer, hidden, **kwargs)
    loss = hidden.square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(param.grad for param in model.parameters())]


def held_in(keeper: keeping.Keeper) -> dict[str, int]:
    """Bytes at rest, or on their way there, by the kind of tier: "device", "cpu" or "disk"."""
    with keeper.lock:
        found = Counter(disk=sum(({} if keeper.opened is None else keeper.opened.held()).values()))
        for tier in keeper._behind.values():
            found["cpu"] += sum(tier.held_in_blocks().values())
        for reference, number in keeper.resting.parts():
            kept = reference()
            if kept is not None and not kept.has_part:  # where it was
                found[keeper._kinds[number]] += 0 if kept._here is None else kept._here.numel()
        return dict(+found)


def plain(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(layer, *args, use_reentrant=False, **kwargs)


def by(keeper: Any, micro: int = 1) -> Any:
    return lambda layer, *args, **kwargs: recompute_with(keeper, micro, layer, args, kwargs, {})


def used_again(model: nn.ModuleList, run: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients of graphs that are kept for another pass, used in part, in another order, nested, or dropped."""
    torch.manual_seed(1)
    x, found = batch().requires_grad_(), []
    hidden = x * 1.0
    for layer in (*model, model[0]):
        hidden = run(layer, hidden)
    for retain in (True, True, False):
        found += torch.autograd.grad(hidden.sum(), [x, *model.parameters()], retain_graph=retain)
    values = [run(layer, x * (1.0 + number)).sum() for number, layer in enumerate((*model, *model))]
    for number in (0, 4, 1, 3):
        found += torch.autograd.grad(values[number], [x, *model[number % 3].parameters()])
        values[2] = values[5] = None
    with torch.no_grad():
        run(model[0], x * 1.0)
    twice = lambda layer, one: run(lambda one: run(layer, run(layer, one)), one)  # noqa: E731
    return [*found, *step(model, twice, x.detach())]


class Broken(RuntimeError):
    pass


def break_off(model: nn.ModuleList, keeper: Any, where: str, number: int) -> None:
    """Layer `number` fails in its forward, when it is computed again, or a hook in backward does."""

    def fails(*_: Any) -> None:
        raise Broken

    def run(layer: nn.Module, x: Tensor, where: str) -> Tensor:
        calls = iter(("forward", "recompute"))
        return by(keeper)(lambda x: fails() if next(calls) == where else layer(x), x)

    def both_ways() -> None:
        hidden = batch().requires_grad_() * 1.0
        for at, layer in enumerate(model):
            hidden = run(layer, hidden, where if at == number else "")
            if at == number and where == "backward":
                hidden.register_hook(fails)
        hidden.sum().backward()

    with pytest.raises(Broken):
        both_ways()


def write_to_an_input(model: nn.ModuleList, keeper: Any) -> None:
    """It is told as torch tells it, whether the input has left already or not."""
    for late in (False, True):
        x = batch().requires_grad_() * 1.0
        hidden = by(keeper)(model[0], x)
        for layer in list(model)[1:] if late else ():
            hidden = by(keeper)(layer, hidden)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def played(**settings: Any) -> Iterator[PlayedDevice]:
    """All tensors lie on a device while this lasts."""
    with waiting_device.played(**settings) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "driver_of", lambda tensor: device)
        yield device
