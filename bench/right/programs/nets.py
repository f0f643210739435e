"""The models that programs begin with: sizes that no number of ranks divides, and some that 8-bit states take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import IN, OUT

WIDTH, WORDS = 64, 11
INNER = (64, 67, 96)  # 64 * 64 and 64 * 96 elements are enough for states of 8 bits


class Block(nn.Module):
    def __init__(self, inner: int = 67, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Parameters of its own and three blocks of different sizes."""

    block: type = Block

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList(self.block(INNER[at % 3]) for at in range(blocks))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.body(self.enter(x)))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(INNER[at]) for at in range(2))
        self.head.weight = self.words.weight

    def hidden(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(words))


class Judge(nn.Module):
    """A score for an output of `Net`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(21, OUT) for _ in range(2))
        self.score = nn.Linear(OUT, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.score(x)


def some_words(step: int, rank: int) -> Tensor:
    return torch.randint(WORDS, (3, 6), generator=torch.Generator().manual_seed(100 * step + rank))
