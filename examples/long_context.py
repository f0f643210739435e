"""Long sequences: activations are computed again from the inputs of units, slice by slice of the batch.

    python examples/long_context.py

`keep` says where the inputs of units wait until the backward pass. `micro` cuts each unit's batch, so that a unit's
parameters come once for all slices. The losses are those of a model without either.
"""

from __future__ import annotations

import torch
from torch import nn

import zerokern as zk

WIDTH, CONTEXT, ROWS = 64, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.wide = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wide(torch.nn.functional.gelu(x + self.mix(x, x, x, need_weights=False)[0]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(steps: int = 3, **settings: object) -> list[float]:
    torch.manual_seed(0)
    model = zk.shard(Model(), stage=3, **settings)  # type: ignore[arg-type]
    opt = zk.AdamW(model.parameters(), lr=1e-3)
    x, losses = torch.randn(ROWS, CONTEXT, WIDTH), []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    print("all activations kept       ", *(f"{loss:.6f}" for loss in train()))
    print('keep="cpu", micro=2        ', *(f"{loss:.6f}" for loss in train(keep="cpu", micro=2)))


if __name__ == "__main__":
    main()
