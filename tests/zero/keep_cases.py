"""Layers whose inputs are large enough to move, a step of them, and a played device that they lie on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import waiting_device
from torch import Tensor, nn

from zerokern.examples.played_device import PlayedDevice
from zerokern.zero import keeping

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


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def played(**settings: Any) -> Iterator[PlayedDevice]:
    """All tensors lie on a device while this lasts."""
    with waiting_device.played(**settings) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "driver_of", lambda tensor: device)
        yield device
