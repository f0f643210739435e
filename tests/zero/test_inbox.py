"""What a bucket hears of gradients that arrive: of one alone, as long as a pass is like the one before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from worlds import STAGES, World, built, everywhere

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.zero import inbox

ALL = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def few_leaves_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "FEWEST_SILENCED", 1)


class Chain(nn.Module):
    """Four layers of one unit each, of two parameters a layer; they are used in the order that a pass says."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in ALL)

    def forward(self, x: Tensor, order: tuple[int, ...], parts: tuple[int, ...]) -> Tensor:
        for number in order:
            for part in parts:
                x = torch.tanh(self.units[number][part](x) if part == 1 else fitted(self.units[number][part], x))
        return x


def fitted(layer: nn.Linear, x: Tensor) -> Tensor:
    """What the layer computes of as many of x's columns as it takes, with zeros for others."""
    return layer(nn.functional.pad(x, (0, layer.in_features - x.shape[1])))


class Pass(NamedTuple):
    order: tuple[int, ...] = ALL
    parts: tuple[int, ...] = (0, 2)
    drops: bool = True  # what an earlier pass has left in `.grad`
    runs: int = 1  # of one graph
    breaks: bool = False
    freezes: bool = False  # a parameter whose gradient is yet to come


class Broken(Exception):
    pass


def backward(model: nn.Module, number: int, one: Pass, rank: int) -> None:
    if one.drops:
        model.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    out = model(x, one.order, one.parts).square()
    if one.breaks:

        def stop(grad: Tensor) -> None:
            raise Broken

        hidden = model.units[one.order[0]][0].bias.register_hook(stop)
        with pytest.raises(Broken):
            out.mean().backward()
        hidden.remove()
        return
    frozen, heard = model.units[one.order[0]][2].weight, model.units[one.order[len(one.order) // 2]][2].bias

    def freeze(grad: Tensor) -> None:
        if one.freezes:
            frozen.requires_grad_(False)

    hook = heard.register_hook(freeze)
    loss = out.mean()
    for run in range(one.runs):
        loss.backward(retain_graph=run + 1 < one.runs)
    hook.remove()
    frozen.requires_grad_(True)


PROGRAMS = {
    "alike": [Pass()] * 4,
    "orders": [Pass(), Pass(), Pass((3, 1, 0, 2)), Pass((3, 1, 0, 2)), Pass(parts=(2, 0)), Pass()],
    "unused": [Pass(), Pass(), Pass((0, 2)), Pass((1, 3), (2,)), Pass(), Pass()],
    "added": [Pass(), Pass(), Pass(drops=False), Pass((2,), drops=False), Pass(drops=False)],
    "twice": [Pass(), Pass(runs=2), Pass((1, 2), runs=3), Pass(runs=2, drops=False)],
    "frozen": [Pass(), Pass(), Pass(freezes=True), Pass(), Pass()],
    "broken": [Pass(), Pass(), Pass(breaks=True), Pass(), Pass()],
}


@contextmanager
def counting(function: str) -> Iterator[list[str]]:
    """The calls of functions of this name in this thread."""
    called: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == function:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(None)


@everywhere(1, 2, stage=STAGES, name=PROGRAMS)
def test_gradients_are_those_of_the_plain_model(world: World, stage: int, name: str) -> None:
    model, plain = world.shard(built(Chain), stage=stage), built(Chain)
    for number, one in enumerate(PROGRAMS[name]):
        with counting("_take_after_launch") as late:
            for each in (model, plain):
                backward(each, number, one, world.rank)
        if not one.breaks:
            compare(world, model, plain, stage)
        assert not late, "a bucket was sent before its gradients were there"


def compare(world: World, model: nn.Module, plain: nn.Module, stage: int) -> None:
    mine = [param.grad for param in model.parameters()]
    found = [param.grad for param in plain.parameters()]
    kept = [None if grad is None else grad.clone() for grad in found]
    world.average_gradients(plain.parameters())
    for (name, param), grad, before in zip(plain.named_parameters(), mine, kept, strict=True):
        if grad is None or param.grad is None:
            assert grad is None and param.grad is None, name
            continue
        local, right = (grad, param.grad) if stage == 0 else (grad.local, grad.span_of(param.grad))
        if world.size == 1:
            assert torch.equal(local, right), name
        else:
            torch.testing.assert_close(local, right, rtol=1e-5, atol=1e-8)
        param.grad = before  # the next pass adds to this rank's own


@everywhere(1, stage=STAGES)
def test_one_gradient_of_a_bucket_is_heard_of(world: World, stage: int) -> None:
    """At stage 3 one more: the first that comes begins the pass."""
    model = world.shard(built(Chain), stage=stage)
    counts = []
    for number in range(3):
        with counting("note") as heard:
            backward(model, number, Pass(), 0)
        counts.append(len(heard))
    buckets = len(sharding_of(model).gradient_buckets)
    assert counts == [16, buckets + (stage == 3), buckets + (stage == 3)]


@everywhere(1, stage=STAGES)
def test_all_are_heard_of_where_they_are_few(world: World, stage: int) -> None:
    """At stage 3 a unit of 12 parameters took longer with one hook than with all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbox, "FEWEST_SILENCED", 17)
        model = world.shard(built(Chain), stage=stage)
        for number in range(3):
            with counting("note") as heard:
                backward(model, number, Pass(), 0)
            assert len(heard) == 16


@everywhere(1, stage=STAGES)
def test_each_gradient_is_heard_of_outside_of_a_known_pass(world: World, stage: int) -> None:
    """The first that comes of a pass without a forward of the model; all of what another order leaves out."""
    model = world.shard(built(Chain), stage=stage)
    for number in range(2):
        backward(model, number, Pass(), 0)
    model.zero_grad()
    read: Callable[[Tensor], Tensor] = torch.square
    sum(read(param).sum() for param in model.units[2].parameters()).backward()
    assert [param.grad is not None for param in model.units[2].parameters()] == [True] * 4
    assert all(param.grad is None for param in model.units[0].parameters())
    with zk.gathered(model):
        values = [param.detach().clone() for param in model.units[2].parameters()]
    for param, value in zip(model.units[2].parameters(), values, strict=True):
        grad = param.grad
        mine, right = (grad, 2 * value) if stage == 0 else (grad.local, grad.span_of(2 * value))
        assert torch.equal(mine, right)
