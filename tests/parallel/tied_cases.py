"""A model whose words are embedded and found again by one weight, in the stages of a pipeline, and in one process."""

from __future__ import annotations

from typing import Any

import torch
from pipeline_cases import CPU, SCHEDULES, mesh_of
from torch import Tensor, nn
from worlds import built

import zerokern as zk

WORDS, WIDTH, MICROS = 131, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Its words are embedded by `words`, and found again by `head`; `more` is another use of them on the way.

    Two small parameters before the weight make the last stage cut it elsewhere than the first does.
    """

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(count)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.more: nn.Embedding | None = self.words
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.words is None else self.words(x)
        for number, block in self.blocks.items():
            x = block(x)
            if self.more is not None and int(number) == self.count - 2:
                x = x + self.more.weight.mean(0)
        return x if self.head is None else self.head(self.norm(x))


def whole(seed: int, uses: int, count: int) -> Model:
    model = built(lambda: Model(count), seed)
    if uses == 2:
        model.more = None
    return model


def part(model: Model, number: int) -> tuple[Model, dict[str, nn.Parameter]]:
    """One stage of as many as there are blocks, and what it shares."""
    count, weight = len(model.blocks), model.words.weight
    for name in list(model.blocks):
        if int(name) != number:
            del model.blocks[name]
    if number > 0:
        model.words = None
    if number != count - 2:
        model.more = None
    if number < count - 1:
        model.norm = model.head = None
    here = any(param is weight for param in model.parameters())
    return model, {"words.weight": weight} if here else {}


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten())


def batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    words = torch.randint(WORDS, (MICROS * 2, 5), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Pipe:
    def __init__(self, name: str, seed: int, uses: int, pp: int, **settings: Any) -> None:
        self.mesh = mesh_of(pp)
        kind, each = SCHEDULES[name]
        mine, count = self.mesh.get_local_rank("pp"), pp * each
        numbers = [mine, count - 1 - mine] if name in ("ZBVZeroBubble", "DualPipeV") else range(mine, count, pp)
        self.count, self.dp = count, self.mesh.get_local_rank("dp")
        self.models, self.stages = [], []
        for number in numbers:
            model, tied = part(whole(seed, uses, count), number)
            zk.shard(model, mesh=self.mesh["dp"], units=lambda one: isinstance(one, Block), **settings)
            self.models.append(model)
            group = self.mesh.get_group("pp")
            self.stages.append(zk.PipelineStage(model, number, count, CPU, group=group, tied=tied))
        self.schedule = kind(self.stages if each > 1 else self.stages[0], MICROS, loss_fn=loss_of)

    def params(self) -> list[nn.Parameter]:
        return [param for model in self.models for param in model.parameters()]

    def step(self, x: Tensor, y: Tensor) -> list[float]:
        losses: list[Tensor] = []
        last = any(stage.is_last for stage in self.stages)
        given = [x] if any(stage.is_first for stage in self.stages) else []
        self.schedule.step(*given, target=y if last else None, losses=losses if last else None)
        return [loss.item() for loss in losses]


class Alone:
    """One process, the weight being one."""

    def __init__(self, seed: int, uses: int, count: int, replicas: int) -> None:
        self.model, self.seed, self.replicas = whole(seed, uses, count), seed, replicas
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, step: int) -> list[list[float]]:
        self.opt.zero_grad()
        losses = []
        for rank in range(self.replicas):
            x, y = batch(self.seed, step, rank)
            losses.append([])
            for xs, ys in zip(x.chunk(MICROS), y.chunk(MICROS), strict=True):
                loss = loss_of(self.model(xs), ys)
                (loss / MICROS / self.replicas).backward()
                losses[-1].append(loss.item())
        return losses

    def named(self) -> dict[str, Tensor]:
        found = dict(self.model.named_parameters())
        return {**found, "head.weight": found["words.weight"], "more.weight": found["words.weight"]}
