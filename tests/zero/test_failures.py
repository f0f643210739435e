"""What goes wrong while training: exceptions, ranks that do different things, ranks that die. Nobody hangs."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from tables import each
from torch import Tensor, nn
from tries import best
from worlds import (
    World,
    anywhere,
    built,
    everywhere,
    full,
    on_ranks,
    on_threads,
    ranked,
    refusal,
    says,
    step_and_zero,
)
from zero_cases import Net, batch, make_adamw, mse

import zerokern as zk

PATIENCE_S = 60.0  # the group's timeout
SOON_S = 20.0  # for what nobody waits that long for, in the best of some tries


class Trouble(Exception):
    pass


class Bad(torch.autograd.Function):
    """Goes forward and fails on the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Trouble("in backward")


def raising(*arguments: object) -> None:
    raise Trouble("in a hook")


def in_a_unit(net: nn.Module) -> Callable[[], None]:
    return net.blocks[1].up.register_forward_pre_hook(raising).remove


def in_the_root(net: nn.Module) -> Callable[[], None]:
    return net.leave.register_forward_hook(raising).remove


def in_a_backward_hook(net: nn.Module) -> Callable[[], None]:
    return net.blocks[1].register_full_backward_hook(raising).remove


def in_backward_of_a_unit(net: nn.Module) -> Callable[[], None]:
    return net.blocks[1].up.register_forward_hook(lambda module, given, out: Bad.apply(out)).remove


def in_backward_of_the_first(net: nn.Module) -> Callable[[], None]:
    return net.enter.register_forward_hook(lambda module, given, out: Bad.apply(out)).remove


def interrupted(net: nn.Module) -> Callable[[], None]:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    return net.blocks[2].register_forward_pre_hook(stop).remove


BREAKS = [in_a_unit, in_the_root, in_a_backward_hook, in_backward_of_a_unit, in_backward_of_the_first, interrupted]


def broken_steps(world: World, stage: int, breaks: list[Callable]) -> None:
    """After each break-off the next step is as if nothing had been: the bits of a run without them."""
    ours, twin = world.shard(built(Net), stage=stage), world.shard(built(Net), stage=stage)
    optimizers = [make_adamw(model.parameters(), max_grad_norm=0.1) for model in (ours, twin)]
    for step, spoil in enumerate([None, *breaks]):
        if spoil is not None:
            mend = spoil(ours)
            with pytest.raises((Trouble, KeyboardInterrupt)):
                mse(ours, 77, world).backward()
            mend()
            optimizers[0].zero_grad()
        for model, optimizer in zip((ours, twin), optimizers, strict=True):
            mse(model, step, world).backward()
            step_and_zero(optimizer)
        same = [torch.equal(a, b) for a, b in zip(full(ours).values(), full(twin).values(), strict=True)]
        assert all(same), f"after {spoil.__name__ if spoil else 'nothing'}"


@each("size, stage", [(1, 3), (2, 0), (2, 2)])
def test_the_step_after_an_exception(size: int, stage: int) -> None:
    anywhere(size, broken_steps, stage, BREAKS)


@everywhere(2, stage=[2])
def test_a_look_at_the_model_after_an_exception(world: World, stage: int) -> None:
    """Between the exception and the next step: zero_grad was not called, somebody looks at the parameters, or saves."""
    model, twin = world.shard(built(Net), stage=stage), world.shard(built(Net), stage=stage)
    for one in (model, twin):
        mse(one, 0, world).backward()
    mend = in_backward_of_a_unit(model)
    with pytest.raises(Trouble):
        mse(model, 1, world).backward()
    mend()
    for name, param in model.named_parameters():
        assert param.shape == dict(built(Net).named_parameters())[name].shape
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(model).items())
    model.zero_grad()
    model(batch(1)[0])
    optimizers = [make_adamw(one.parameters()) for one in (model, twin)]
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        one.zero_grad()
        mse(one, 2, world).backward()
        optimizer.step()
    assert all(torch.equal(value, full(twin)[name]) for name, value in full(model).items())


@ranked
def exceptions_on_ranks(world: World) -> None:
    broken_steps(world, 3, BREAKS[::2])
    test_a_look_at_the_model_after_an_exception(world, 3)


def test_exceptions_on_real_ranks() -> None:
    on_ranks(2, exceptions_on_ranks)


def skips_a_unit(world: World, model: nn.Module) -> None:
    if world.rank == 1:
        blocks = list(model.blocks)
        model.body = lambda x: blocks[2](blocks[0](x))
    mse(model, 9, world).backward()


def one_stops(world: World, model: nn.Module) -> None:
    """Rank 0 has a batch more than the others, which are at the end of their program."""
    if world.rank == 0:
        mse(model, 9, world).backward()


DEVIATIONS = {work.__name__: work for work in (skips_a_unit, one_stops)}


@ranked
def deviate(world: World, stage: int, warm: int, deviation: str) -> tuple[str, float]:
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters())
    for step in range(warm):
        mse(model, step, world).backward()
        step_and_zero(optimizer)
    began = time.monotonic()
    try:
        DEVIATIONS[deviation](world, model)
    except (zk.CommError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def test_ranks_that_do_different_things_are_told() -> None:
    def told() -> float:
        answers = on_ranks(2, deviate, 3, 2, "skips_a_unit", patience=PATIENCE_S, timeout=3 * PATIENCE_S)
        for message, _ in answers:
            says(message, ["CommError", "rank 1", "unit"])
        return max(took for _, took in answers)

    assert best(told, SOON_S) < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2])
def test_no_rank_waits_for_ever(stage: int) -> None:
    """Below stage 3 a forward is nobody's business; whoever then lacks a partner ends within the group's timeout."""
    answers = on_ranks(2, deviate, stage, 2, "one_stops", patience=PATIENCE_S, timeout=4 * PATIENCE_S)
    assert all(took < 2 * PATIENCE_S for _, took in answers), answers
    assert any("CommError" in message and "rank 1" in message for message, _ in answers), answers


@ranked
def die(world: World, stage: int, when: str) -> tuple[str, float]:
    model = world.shard(built(Net), stage=stage)
    optimizer = make_adamw(model.parameters(), max_grad_norm=1.0)
    for step in range(2):
        mse(model, step, world).backward()
        step_and_zero(optimizer)
    victim = world.size - 1

    def end(*arguments: object) -> None:
        if world.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    if when == "forward":
        model.blocks[1].register_forward_pre_hook(end)
    if when == "backward":
        model.blocks[1].register_full_backward_hook(end)
    began = time.monotonic()

    def go_on() -> None:
        for step in range(2, 5):
            mse(model, step, world).backward()
            if when == "step":
                end()
            step_and_zero(optimizer)

    message = refusal(go_on, zk.CommError)
    again = refusal(lambda: mse(model, 9, world).backward(), zk.CommError) if stage == 3 else message
    says(again, [f"rank {victim}"])
    return message, time.monotonic() - began


LOST = [(3, 2, "backward")]  # tests/zero/test_hybrid_failures.py: in a forward
LOST_TOO = [(2, 1, "step"), (3, 3, "forward")]


@pytest.mark.parametrize(
    "size, stage, when", [*LOST, *(pytest.param(*row, marks=pytest.mark.slow) for row in LOST_TOO)]
)
def test_a_rank_that_dies_is_named(size: int, stage: int, when: str) -> None:
    def named() -> float:
        answers = on_ranks(size, die, stage, when, dies=[size - 1], patience=PATIENCE_S, timeout=2 * PATIENCE_S)
        for message, _ in answers[:-1]:
            says(message, [f"rank {size - 1}"])
        return max(took for _, took in answers[:-1])

    assert best(named, SOON_S) < SOON_S


def thrown_by_one_thread(world: World) -> None:
    model = world.shard(built(Net), stage=3)
    mse(model, 0, world).backward()
    if world.rank == 1:
        raise Trouble("here")
    mse(model, 1, world).backward()


def test_an_exception_on_one_thread_releases_the_others() -> None:
    with pytest.raises(Trouble):
        on_threads(2, thrown_by_one_thread)


@each("stage", [0, 2])  # at stage 3 a graph keeps the model
def test_a_graph_that_outlived_its_model(stage: int) -> None:
    """Its gradients would have no parameters to go to."""
    model = zk.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), stage=stage)
    loss = model(torch.ones(3, 4)).sum()
    del model
    gc.collect()
    with pytest.raises(zk.StateError, match="a sharded model that is gone"):
        loss.backward()
