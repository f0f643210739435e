"""Which gradients there are on any rank: on a device the host asks for the answer only where `.grad` depends on it."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_world import FakeGroup
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
    def train(world: World) -> tuple[str, int]:
        model, passes = sharded(world), [0]
        opt = zk.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0)

        def steps() -> None:
            for step in range(3):
                model.parts[2].requires_grad_(not (step and world.rank))
                model(torch.ones(2, 6)).backward()
                passes[0] += 1
                step_and_zero(opt)

        return refusal(steps, zk.ZerokernError), passes[0]

    found = on_threads(2, train)
    assert found[1][1] == 1, "the pass in which they are is refused, before any step"
    for said, _ in found:
        says(said, ["parts.2.weight", "frozen on this rank", "on all ranks alike"])


def test_ranks_that_freeze_alike_agree_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the device, when another set of parameters is frozen than in the pass before."""
    said: list[str] = []
    agree = FakeGroup.agree
    monkeypatch.setattr(FakeGroup, "agree", lambda self, key: (said.append(key), agree(self, key))[1])

    @ranked
    def train(world: World) -> None:
        model = sharded(world)
        for step in range(6):
            model.parts[1].requires_grad_(not 1 <= step < 4)
            model(torch.ones(2, 6)).backward()
            assert (model.parts[1].weight.grad is None) == (1 <= step < 4)
            model.zero_grad()

    on_threads(2, train)
    assert sorted(key.partition(" frozen")[0] for key in said) == ["0 parameters"] * 2 + ["2 parameters"] * 2, said


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_shows_a_gradient_anyway_is_not_asked_for(stage: int, reads: list[str]) -> None:
    """Of an earlier micro-batch, or zeros: whether other ranks had one is no matter to `.grad`. Experts that each rank
    chooses cost a wait in the first micro-batch of a step, and none with `zero_grad(set_to_none=False)`."""

    @ranked
    def train(world: World) -> list[int]:
        model, asking = sharded(world, stage), world.shard(built(Parts), stage=stage)
        waits = []
        for idle in [(1, 2), (1, 2), (3, 3), (None, None), (2, 0)]:
            before = reads.count(threading.current_thread().name)
            model(torch.ones(2, 6), idle=idle[world.rank]).backward()
            waits.append(reads.count(threading.current_thread().name) - before)
            asking(torch.ones(2, 6), idle=idle[world.rank]).backward()
            for mine, theirs in zip(model.parameters(), asking.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if mine.grad is not None:
                    spans = [getattr(one.grad, "local", one.grad) for one in (mine, theirs)]
                    assert torch.equal(*spans), "bits"
        model.zero_grad(set_to_none=False)
        before = reads.count(threading.current_thread().name)
        model(torch.ones(2, 6), idle=world.rank).backward()
        return [*waits, reads.count(threading.current_thread().name) - before]

    assert on_threads(2, train) == [[2, 0, 0, 0, 0, 0]] * 2, "and the order of buckets, in the first pass"


def test_hooks_on_a_parameter_want_the_answer() -> None:
    """They are called where any rank had a gradient of it, though `.grad` shows one anyway."""

    @ranked
    def train(world: World) -> int:
        model, called = sharded(world), [0]
        model.parts[1].weight.register_post_accumulate_grad_hook(lambda _: called.__setitem__(0, called[0] + 1))
        for idle in (None, 1 - world.rank, 1):
            model(torch.ones(2, 6), idle=idle).backward()
        return called[0]

    assert on_threads(2, train) == [2, 2]
