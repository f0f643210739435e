"""A model whose Linears are tiled, and what is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from worlds import built, step_and_zero

import zerokern as zk

WIDTH, HIDDEN, TILES = 32, 192, 4


class Mlp(nn.Module):
    """Units, and a head of the root's."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width, bias=False))
            for _ in range(blocks)
        )
        self.leave = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def mlp() -> Mlp:
    return built(Mlp)


def tiled() -> Mlp:
    return zk.tile(mlp(), tiles=TILES)


def batches(steps: int, rank: int = 0, seed: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed + 10 * rank)
    for _ in range(steps):
        yield torch.randn(8, WIDTH, generator=generator)


def train(model: nn.Module, steps: int = 4, rank: int = 0, opt: Any = None, seed: int = 3, **settings: Any) -> list:
    opt = opt or zk.AdamW(model.parameters(), lr=1e-2, **settings)
    losses = []
    for x in batches(steps, rank, seed):
        loss = model(x).float().square().mean()
        loss.backward()
        step_and_zero(opt)
        losses.append(loss.item())
    opt.flush()
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    with zk.gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())
