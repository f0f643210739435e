"""Ranks that make different calls are told by name which, within seconds: the ways in which programs come to do so."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tries import best
from worlds import on_ranks, ranked, says, step_and_zero
from zero_cases import IN, Net

import zerokern as zk

SOON_S = 30.0  # in the best of some tries
LATE_S = 90.0  # where one try must do
PATIENCE_S = 180.0  # the group's timeout, which nobody waits for


@dataclass
class Program:
    """What a rank trains, on a process group of its own: a failed one is of no more use."""

    rank: int
    stage: int
    settings: dict[str, Any]
    folder: str
    pg: Any = field(default_factory=lambda: dist.new_group(list(range(dist.get_world_size()))))

    def __post_init__(self) -> None:
        self.mesh = DeviceMesh.from_group(self.pg, "cpu")
        self.model = self.shard(Net())
        self.opt = zk.AdamW(self.model.parameters(), lr=1e-3, **self.settings)

    def shard(self, model: nn.Module) -> nn.Module:
        return zk.shard(model, stage=self.stage, mesh=self.mesh, bucket_bytes=8192)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.stage}"

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(2, IN)).square().mean()

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.backward()
        step_and_zero(self.opt)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.step()


def save(program: Program) -> None:
    zk.save(program.path, program.model, program.opt, group=program.pg)


def export(program: Program) -> None:
    zk.export(program.path, program.model, group=program.pg)


def save_alone(program: Program) -> None:
    if program.rank == 0:
        save(program)
    program.train()


def load_alone(program: Program) -> None:
    save(program)
    if program.rank == 1:
        zk.load(program.path, program.model, program.opt, group=program.pg)
    program.train()


def save_against_export(program: Program) -> None:
    (export if program.rank else save)(program)
    program.train()


def one_backward_more(program: Program) -> None:
    if program.rank == 0:
        program.backward()
    program.train()


def clip_alone(program: Program) -> None:
    program.backward()
    if program.rank == 0:
        zk.clip_grad_norm_(program.model, 1.0)
    program.opt.step()
    program.train()


def skip_a_batch(program: Program) -> None:
    for number in range(4):
        if number == 1 and program.rank == 1:
            continue
        program.step()
    save(program)


def step_alone(program: Program) -> None:
    program.backward()
    if program.rank == 0:
        program.opt.step()
    program.opt.zero_grad()
    program.train()


def flush_alone(program: Program) -> None:
    if program.rank == 1:
        program.opt.flush()
    program.train()


def shard_alone(program: Program) -> None:
    if program.rank == 0:
        program.shard(Net(blocks=1))
    program.train()


def other_units(program: Program) -> None:
    if program.rank == 1:
        blocks = list(program.model.blocks)
        program.model.body = lambda x: blocks[1](blocks[0](x))
    program.train()


def raise_and_go_on(program: Program) -> None:
    if program.rank == 1:
        handle = program.model.blocks[1].register_forward_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            program.forward()
        handle.remove()
    program.train()


def _raise(*arguments: object) -> None:
    raise ZeroDivisionError


@dataclass(frozen=True)
class Way:
    run: Callable[[Program], None]
    stage: int
    says: tuple[str, ...]  # what every rank hears
    settings: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    def __str__(self) -> str:
        return f"{self.run.__name__}-{self.stage}"


OVERLAP = {"schedule": "overlap"}
DELAYED = {"tier": "cpu", "schedule": zk.Delayed(after=0)}
WAYS = [
    Way(save_alone, 3, ("zk.save", "the forward of"), quick=True),
    Way(save_alone, 2, ("zk.save", "a backward pass")),
    Way(save_against_export, 2, ("zk.save", "zk.export")),
    Way(load_alone, 2, ("zk.load",)),
    Way(one_backward_more, 2, ("a backward pass", "opt.step"), quick=True),
    Way(clip_alone, 2, ("zk.clip_grad_norm_", "opt.step"), quick=True),
    Way(skip_a_batch, 2, ("zk.save",)),
    Way(step_alone, 2, ("opt.step",)),
    Way(step_alone, 1, ("opt.step",), OVERLAP),
    Way(flush_alone, 2, ("opt.flush",), DELAYED),
    Way(shard_alone, 2, ("zk.shard",)),
    Way(other_units, 3, ("the backward of",)),
    Way(raise_and_go_on, 3, ("the forward of",), quick=True),
]


@ranked
def go(world: Any, numbers: list[int], folder: str) -> list[tuple[str, float]]:
    answers = []
    for number in numbers:
        way = WAYS[number]
        dist.barrier()  # of the world, which no failure of these groups reaches
        program = Program(world.rank, way.stage, way.settings, f"{folder}/{number}")
        program.train(2)
        began = time.monotonic()
        try:
            way.run(program)
            said = "nothing"
        except zk.CommError as error:
            said = str(error)
        answers.append((said, time.monotonic() - began))
    return answers


def told(ways: list[Way], folder: Path, size: int = 2) -> float:
    """Every rank hears it, by name, and all ranks go on to another group: none of them was ended. After how long."""
    answers = on_ranks(
        size, go, [WAYS.index(way) for way in ways], str(folder), patience=PATIENCE_S, timeout=3 * PATIENCE_S
    )
    for rank, mine in enumerate(answers):
        for way, (said, seconds) in zip(ways, mine, strict=True):
            assert seconds < LATE_S, f"{way} on rank {rank}: {seconds:.1f} s, {said}"
            says(said, ("rank", *way.says))
    return max(seconds for mine in answers for _, seconds in mine)


def test_ranks_that_make_different_calls_are_told_which(tmp_path: Path) -> None:
    tries = itertools.count()
    quick = [way for way in WAYS if way.quick]
    assert best(lambda: told(quick, tmp_path / f"{next(tries)}"), SOON_S) < SOON_S


@pytest.mark.slow
def test_all_the_ways(tmp_path: Path) -> None:
    told([way for way in WAYS if not way.quick], tmp_path)
