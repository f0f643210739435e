"""Which gradients there are on any rank: on a device the host asks for the answer only where `.grad` depends on it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from worlds import World, built, on_threads, ranked, refusal, says, step_and_zero

import zerokern as zk
from zerokern.api import sharding_of


class Parts(nn.Module):
    """`idle` says which of its parts have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, idle: int | None = None) -> Tensor:
        return sum(part(x).square().sum() for number, part in enumerate(self.parts) if number != idle)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads whose host has read a tensor, each time."""
    found: list[str] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> list:
        found.append(threading.current_thread().name)
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    return found


def sharded(world: World, stage: int = 2) -> nn.Module:
    """Its ranks tell each other of gradients as ranks on devices do."""
    model = world.shard(built(Parts), stage=stage)
    sharding_of(model).reduction._on_host = False
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_cost_no_wait(stage: int, reads: list[str]) -> None:
    """LoRA freezes most of a model: each pass read the device, at the end of its queue. What is read later is there."""

    @ranked
    def train(world: World) -> int:
        model = sharded(world, stage)
        model.parts[1].requires_grad_(False)
        for _ in range(3):
            model(torch.ones(2, 6)).backward()
            assert [part.weight.grad is None for part in model.parts] == [False, True, False, False]
            model.zero_grad()
        before = reads.count(threading.current_thread().name)
        sharding_of(model).reduction._answers.clear()
        model(torch.ones(2, 6)).backward()
        return reads.count(threading.current_thread().name) - before

    assert on_threads(2, train) == [0, 0]


def test_what_one_rank_does_not_use_is_asked_for(reads: list[str]) -> None:
    """Others have a gradient of it, or none: `.grad` says which, so that the host waits, once."""

    @ranked
    def train(world: World) -> tuple[list[bool], int]:
        model = sharded(world)
        model(torch.ones(2, 6)).backward()
        model.zero_grad()
        before = reads.count(threading.current_thread().name)
        model(torch.ones(2, 6), idle=world.rank or None).backward()
        return [part.weight.grad is None for part in model.parts], reads.count(threading.current_thread().name) - before

    assert on_threads(2, train) == [([False] * 4, 0), ([False] * 4, 1)]


def test_ranks_that_freeze_differently_are_told() -> None:
    @ranked
    def train(world: World) -> str:
        model = sharded(world)
        opt = zk.SGD(model.parameters(), lr=0.1)
        if world.rank:
            model.parts[2].requires_grad_(False)

        def steps() -> None:
            for _ in range(3):
                model(torch.ones(2, 6)).backward()
                step_and_zero(opt)

        return refusal(steps, zk.ZerokernError)

    said = on_threads(2, train)
    says(said[1], ["parts.2.weight", "frozen on this rank", "on all ranks alike", "load a checkpoint"])
    assert "rank 1" in said[0]
