"""torch.compile for each unit: nothing of ours in the graph, none of it in the way, compiled once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from worlds import World, alone, built, full, on_ranks, ranked, step_and_zero
from zero_cases import Net, make_adamw, mse

from zerokern import StateError

BACKEND = "aot_eager"  # the whole of capture and autograd, without a C++ compiler's seconds


def in_place_after(world: World, net: Net, stage: int, backend: str) -> nn.Module:
    """The usual order: shard, then compile each block in place."""
    world.shard(net, stage=stage)
    for block in net.blocks:
        block.compile(fullgraph=True, backend=backend)
    return net


def in_place_before(world: World, net: Net, stage: int, backend: str) -> nn.Module:
    for block in net.blocks:
        block.compile(fullgraph=True, backend=backend)
    return world.shard(net, stage=stage)


def forwards(world: World, net: Net, stage: int, backend: str) -> nn.Module:
    world.shard(net, stage=stage)
    for block in net.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
    return net


def replaced_before(world: World, net: Net, stage: int, backend: str) -> nn.Module:
    """As torchtitan does: the compiled module takes the block's place, and is the unit."""
    for number, block in enumerate(net.blocks):
        net.blocks[number] = torch.compile(block, fullgraph=True, backend=backend)
    return world.shard(net, stage=stage)


class Checkpointed(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def made() -> int:
    return counters["stats"]["unique_graphs"]


def trains(world: World, stage: int, how: Callable, make: Callable = Net, backend: str = BACKEND) -> None:
    """The losses of eager training; no graph is made after the second step; one graph serves blocks of equal shape."""
    torch._dynamo.reset()
    counters.clear()
    plain = built(make)
    ours = how(world, copy.deepcopy(plain), stage, backend)
    pairs = [(ours, make_adamw(ours.parameters())), (plain, make_adamw(plain.parameters()))]
    for step in range(5):
        if step == 2:
            graphs = made()
        losses = []
        for model, optimizer in pairs:
            loss = mse(model, step, world)
            loss.backward()
            if model is plain:
                world.average_gradients(plain.parameters())
            step_and_zero(optimizer)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        if step == 3:
            assert made() == graphs, "compiled again after the second step"
            with torch.no_grad():
                torch.testing.assert_close(mse(ours, 9, world), mse(plain, 9, world), rtol=1e-5, atol=1e-6)
            graphs = made()  # evaluation has its own
    assert made() == graphs, "compiled again after the second step"
    assert graphs > 0
    assert not counters["graph_break"], dict(counters["graph_break"])
    for name, value in full(ours).items():
        reference = dict(plain.named_parameters())[name.replace("_orig_mod.", "")].detach()
        torch.testing.assert_close(
            value, reference, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


ROWS = [(3, replaced_before), (2, in_place_after)]
MORE = [(1, in_place_before), (3, forwards)]


@pytest.mark.parametrize("stage, how", [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)])
def test_units_compiled_one_by_one(stage: int, how: Callable) -> None:
    alone(trains, stage, how)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_compiled_and_checkpointed(stage: int) -> None:
    alone(trains, stage, in_place_after, Checkpointed)


@ranked
def on_real_ranks(world: World, stages: list[int], backend: str) -> None:
    for stage in stages:
        trains(world, stage, in_place_after, Net, backend)
    trains(world, 3, in_place_after, Checkpointed, backend)
    trains(world, 3, forwards, Net, backend)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    on_ranks(2, on_real_ranks, [0, 2, 3], "inductor", timeout=500)


def compiled_backwards(world: World) -> None:
    torch._dynamo.reset()
    for stage in (1, 2, 3):
        net = built(Net)
        world.shard(net, stage=stage)
        optimizer = make_adamw(net.parameters())
        for step in range(2):
            with _enable(lambda graph: graph), pytest.raises(StateError, match="compiled autograd"):
                mse(net, step, world).backward()
            optimizer.zero_grad()
            mse(net, step, world).backward()  # as ever, when torch's engine runs it
            assert all(param.grad is not None for param in net.parameters())
            step_and_zero(optimizer)


def beside_compiled_backwards(world: World) -> None:
    """Another thread's pass, of a model that is not sharded, is no reason to refuse this one."""
    runs, ends, failed = threading.Event(), threading.Event(), []

    def compiler(graph: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            runs.set()
            assert ends.wait(60)
            return graph(*given, **named)

        return run

    def other() -> None:
        try:
            with _enable(compiler):
                torch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()
        except BaseException as error:
            failed.append(error)

    torch._dynamo.reset()
    net = built(Net)
    world.shard(net, stage=2)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert runs.wait(60)
        mse(net, 0, world).backward()
    finally:
        ends.set()
        thread.join()
    assert not failed and all(param.grad is not None for param in net.parameters())


def test_backwards_by_compiled_autograd_are_refused() -> None:
    """Its graph would hold the accumulation of gradients, and zk.shard be given none."""
    alone(compiled_backwards)
    alone(beside_compiled_backwards)
