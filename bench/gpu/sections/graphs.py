"""A whole training step under zk.shard as a CUDA graph, stages 0 to 3 through NCCL on one rank: losses of replays
against those of eager steps, bit for bit, and the time of both. A rehearsal repeats what it would capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zerokern as zk
from zerokern.comm import Group

from ...contest import Provider
from ...offload.device import HYPER, MAX_NORM, Stage, Trainer
from ..report import Desk
from ..turns import Contest
from . import zero
from .zero import BYTES, STAGES, Field, name_of, one_rank

WARM, COMPARED = 3, 4


class Repeated:
    """What plays `torch.cuda.CUDAGraph` in a rehearsal: a replay calls the step again."""

    def __init__(self) -> None:
        self.step: Callable[[], object] = lambda: None

    def replay(self) -> None:
        self.step()


class Replayed:
    """A step that is captured once it has run a few times, and replayed from then on."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], on_gpu: bool) -> None:
        self._step, self._on_gpu = step, on_gpu
        self._ran = 0
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._loss: Tensor | None = None
        self._graph: Any = None

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._inputs is None:
            self._inputs = tokens.clone(), targets.clone()
        for own, given in zip(self._inputs, (tokens, targets), strict=True):
            own.copy_(given)
        self._ran += 1
        if self._ran <= WARM:
            return self._step(*self._inputs)
        if self._graph is None:
            self._capture(*self._inputs)
        self._graph.replay()
        assert self._loss is not None
        return self._loss.clone()

    def _capture(self, *inputs: Tensor) -> None:
        if self._on_gpu:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(*inputs)
            return
        self._graph = Repeated()

        def again() -> None:
            self._loss = self._step(*inputs)

        self._graph.step = again


def trainer(stage: Stage, number: int, group: Group | None, graph: bool) -> Trainer:
    """zero_grad() stands in front, where a graph must have it."""
    on_gpu = stage.device.type == "cuda"
    model = zk.shard(stage.model(), stage=number, mesh=group)
    more: dict[str, Any] = {"capturable": True} if on_gpu else {}
    optimizer: Any = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER, **more)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(Replayed(step, on_gpu) if graph else step)


def run(desk: Desk) -> None:
    settings = desk.settings
    with one_rank(settings) as (group, backend):
        stage = Stage(settings.device, zero.TOY if settings.rehearse else zero.SHAPE, recompute=False)
        tokens = zero.TOY_TOKENS if settings.rehearse else zero.TOKENS
        apart = {}
        for number in STAGES:
            try:
                apart[number] = difference(stage, number, group, stage.batch(tokens))
            except Exception as error:
                desk.could_not(f"graphs: stage {number}", error)
        if len(apart) == len(STAGES):
            desk.figure("graphs.loss", max(apart.values()), of=f"{COMPARED} replays, stages 0 to 3")
        elif apart:
            desk.could_not("graphs.loss", f"stages {[n for n in STAGES if n not in apart]} were not captured")
        desk.fact("graphs: largest difference of a loss", "rehearsed" if settings.rehearse else apart)
        field = Field(stage, tokens, tokens)

        def maker(number: int, graph: bool, name: str) -> Callable[[], Sequence[Provider]]:
            build = functools.partial(trainer, number=number, group=group, graph=graph)
            return lambda: field.provider(name, build, BYTES)

        ours = {name: maker(n, True, name) for n in apart for name in [f"{name_of(n, backend)}, a graph"]}
        peers = {name: maker(n, False, name) for n in apart for name in [f"{name_of(n, backend)}, eager"]}
        title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, as a CUDA graph"
        desk.contest(Contest(title, stage.shape.numel, ours, peers))


def difference(stage: Stage, number: int, group: Group | None, batch: Sequence[Tensor]) -> float:
    """The largest difference between a loss of a replay and that of an eager step; 0 where bits are the same."""
    losses = []
    for graph in (False, True):
        one = trainer(stage, number, group, graph)
        losses.append([one.step(*batch).item() for _ in range(WARM + COMPARED)])
    return max(abs(mine - other) for mine, other in zip(*losses, strict=True))
