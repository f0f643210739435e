"""A small GPT in plain torch.

Byte level, pre-norm, learned positions, output weights tied to the embedding: nothing in it knows about zerokern.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .widen import WideAttention, WideLinear, attend

VOCABULARY = 256
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """Depth, width and context of a GPT.

    >>> Shape(layers=6, width=384, context=128).numel
    10774272
    """

    layers: int
    width: int
    context: int

    @property
    def numel(self) -> int:
        block = 12 * self.width * self.width + 4 * self.width
        return self.layers * block + (VOCABULARY + self.context + 2) * self.width


def product(x: Tensor, weight: Tensor, widen: bool) -> Tensor:
    return WideLinear.apply(x, weight) if widen else F.linear(x, weight)


class Block(nn.Module):
    def __init__(self, width: int, widen: bool) -> None:
        super().__init__()
        self.widen = widen
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return product(x, layer.weight, self.widen)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.linear(self.qkv, x).view(batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        mixed = WideAttention.apply(heads) if self.widen else attend(heads)
        return self.linear(self.mix, mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.linear(self.down, F.gelu(self.linear(self.up, self.norm_mlp(x))))


class GPT(nn.Module):
    """Predicts the next byte. `widen` computes the matrix products of a bf16 model in fp32 (see `widen.py`)."""

    def __init__(self, shape: Shape, widen: bool = False) -> None:
        super().__init__()
        self.widen = widen
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, widen) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.initialize()

    def initialize(self) -> None:
        residual_std = 0.02 / (2 * len(self.blocks)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith(("mix.weight", "down.weight")) else 0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = product(self.norm(x), self.tokens.weight, self.widen)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
