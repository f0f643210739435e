"""What goes wrong while training: exceptions, ranks that do different things, ranks that die. Nobody hangs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Interrupt
from tables import each
from torch import Tensor, nn
from tries import best
from worlds import (
    World,
    alone,
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
from zerokern.api import sharding_of
from zerokern.zero import saved_hooks
from zerokern.zero.kinds import local_of
from zerokern.zero.reduction import Reduction
from zerokern.zero.shard import shard_of

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


def dropped_by_the_model(world: World, stage: int) -> None:
    model = world.shard(built(Net), stage=stage)
    mse(model, 0, world).backward()
    expected = {name: local_of(param.grad).clone() for name, param in model.named_parameters()}
    for spoil in (in_backward_of_a_unit, in_backward_of_the_first):
        mend = spoil(model)
        with pytest.raises(Trouble):
            mse(model, 1, world).backward()
        mend()
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters()), spoil.__name__
        mse(model, 0, world).backward()
        found = {name: local_of(param.grad) for name, param in model.named_parameters()}
        assert all(torch.equal(found[name], one) for name, one in expected.items()), spoil.__name__


@each("size, stage", [(1, 3), (2, 0), (2, 2), (2, 3)])
def test_the_model_drops_gradients_after_an_exception(size: int, stage: int) -> None:
    """Those of the pass before, which are the parameters' that the user knows."""
    anywhere(size, dropped_by_the_model, stage)


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


@each("stage", [0, 1, 2, 3])
def test_what_was_kept_is_back_when_the_end_of_a_pass_has_failed(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the collector finds the traceback: a tensor that is given to a parameter then ends the process."""

    def work(world: World) -> None:
        net = built(Net)
        world.shard(net, stage=stage)
        mse(net, 0, world).backward()
        kept = [param.grad for param in net.parameters()]
        assert any(one is not None for one in kept)
        with monkeypatch.context() as patch:
            patch.setattr(Reduction, "_heard", raising)
            with pytest.raises(Trouble) as caught:
                mse(net, 1, world).backward()
            assert caught.value.__traceback__ is not None  # which is kept
            assert all(param.grad is one for param, one in zip(net.parameters(), kept, strict=True))
            first = next(param for param in net.parameters() if param.grad is not None)
            first.grad = other = torch.zeros_like(first.grad)
            del caught
            gc.collect()
            assert first.grad is other

    on_threads(1, work)


@each("stage", [0, 2])  # at stage 3 a graph keeps the model
def test_a_graph_that_outlived_its_model(stage: int) -> None:
    """Its gradients would have no parameters to go to."""
    model = zk.shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), stage=stage)
    loss = model(torch.ones(3, 4)).sum()
    del model
    gc.collect()
    with pytest.raises(zk.StateError, match="a sharded model that is gone"):
        loss.backward()


def parts(params: list[Tensor], grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """This rank's elements of each gradient."""
    pairs = zip(map(shard_of, params), grads, strict=True)
    return [None if grad is None else shard.part_of(grad).reshape(-1).clone() for shard, grad in pairs]


def alike(left: Tensor | None, right: Tensor | None, world: World) -> bool:
    """On one rank to the bit: two add their gradients to one that is kept one by one."""
    if left is None or right is None:
        return left is right
    return torch.equal(left, right) if world.size == 1 else torch.allclose(left, right, rtol=1e-5, atol=1e-7)


def added(left: Tensor | None, right: Tensor) -> Tensor:
    return right if left is None else left + right


def small() -> Net:
    return Net(2, 4)


def interrupted_passes(world: World, settings: dict[str, Any], numbers: Iterable[int], *, kept: bool) -> bool:
    """A micro-batch is broken off at a line. Then the program calls zero_grad(), or not, and goes on with the next one.

    A gradient is what it was before, or has all of the batch, as parameters of plain torch have; what comes is added.
    """
    plain = built(small)
    model = world.shard(built(small), **settings)
    if isinstance(settings.get("tier"), zk.Nvme):
        sharding_of(model).rests.leaving_nbytes = 0
    params, wanted = list(model.parameters()), []
    optimizer = zk.SGD(params, lr=0.1)
    for step in range(3):
        mse(plain, step, world).backward()
        world.average_gradients(plain.parameters())
        wanted.append(parts(params, [param.grad for param in plain.parameters()]))
        plain.zero_grad()
    names = [name for name, _ in plain.named_parameters()]

    def lines_of_a_pass() -> int:
        counts = []
        for _ in range(6):  # the first two settle what is made once, or after a pass that broke off
            optimizer.zero_grad()
            with Interrupt(0) as count:
                mse(model, 0, world).backward()
            counts.append(count.lines)
        optimizer.zero_grad()
        return min(counts[2:])

    lines = lines_of_a_pass()
    for turn, number in enumerate(numbers):
        if kept:
            mse(model, 0, world).backward()
        kept_error: list[object] = []  # as notebooks keep one, with its frames
        try:
            with Interrupt(number) as interrupt:
                mse(model, 1, world).backward()
        except KeyboardInterrupt as error:
            kept_error.append(error)
        where = number, interrupt.where
        if turn % 2:
            optimizer.zero_grad()
        found = parts(params, [param.grad for param in params])
        for name, one, before, new in zip(names, found, wanted[0], wanted[1], strict=True):
            before = before if kept and not turn % 2 else None
            whole = not turn % 2 and alike(one, added(before, new), world)
            assert whole or alike(one, before, world), (*where, name)
        mse(model, 2, world).backward()
        now = parts(params, [param.grad for param in params])
        for name, one, before, new in zip(names, now, found, wanted[2], strict=True):
            assert alike(one, added(before, new), world), (*where, name, one / added(before, new))
        optimizer.zero_grad()
        if not interrupt.where:
            waits = world.size > 1 or settings.get("keep") == "cpu" or isinstance(settings.get("tier"), zk.Nvme)
            assert waits or lines_of_a_pass() == lines, "a pass that broke off costs those after it"
            return True
    return False


def interrupted_moves(world: World, stage: int) -> int:
    """The program keeps the gradients of a pass and drops `.grad`: the next pass moves what it reduces to other memory.

    It is broken off in that, at any line: what the program has kept stays, and passes after it are right.
    """
    plain, model = built(small), world.shard(built(small), stage=stage)
    params, wanted = list(model.parameters()), []
    for step in range(2):
        mse(plain, step, world).backward()
        wanted.append(parts(params, [param.grad for param in plain.parameters()]))
        plain.zero_grad()
    for number in itertools.count(1):
        mse(model, 0, world).backward()
        kept = [param.grad for param in params]
        model.zero_grad()
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number, "_move") as interrupt:
            mse(model, 1, world).backward()
        model.zero_grad()
        for _ in range(2):
            mse(model, 1, world).backward()
            now = parts(params, [param.grad for param in params])
            assert all(alike(one, new, world) for one, new in zip(now, wanted[1], strict=True)), interrupt.where
            model.zero_grad()
        before = parts(params, kept)
        assert all(alike(one, old, world) for one, old in zip(before, wanted[0], strict=True)), interrupt.where
        if not interrupt.where:
            return number
    raise AssertionError


def interrupted_steps(world: World, settings: dict[str, Any], numbers: Iterable[int], *, warm: bool) -> bool:
    """step() and zero_grad() are broken off at a line: the step is made, or it is not, parameters and state alike.

    `warm`: a step is made before, so that state is there.
    """
    plain, model = built(small), world.shard(built(small), stage=settings["stage"])
    ours = make_adamw(model.parameters(), schedule=settings["schedule"])
    pairs = [(model, ours), (plain, make_adamw(plain.parameters()))]
    for turn, number in enumerate(itertools.chain([0] if warm else [], numbers)):
        for one, _ in pairs:
            mse(one, turn, world).backward()
        world.average_gradients(plain.parameters())
        before = [param.detach().clone() for param in plain.parameters()]
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as interrupt:
            step_and_zero(ours)
        now = list(full(model).values())
        if not all(map(torch.equal, now, before)):
            pairs[1][1].step()
        assert all(map(torch.equal, now, plain.parameters())), (number, interrupt.where)
        for _, optimizer in pairs:
            optimizer.zero_grad()
        if number and not interrupt.where:
            return True
    return False


PASSES = [  # what zk.shard is given, whether a gradient is kept from before, and how many lines a quick row goes on by
    ({"stage": 1}, True, 23),
    ({"stage": 3}, False, 37),
    ({"stage": 3, "tier": "nvme"}, True, 151),
    ({"stage": 0}, True, 0),
    ({"stage": 2}, False, 0),
    ({"stage": 2, "keep": "device"}, True, 0),
    ({"stage": 3, "units": []}, True, 0),
    ({"stage": 3, "keep": "cpu"}, True, 0),
    ({"stage": 3, "tier": "cpu"}, True, 0),
]
TWO_RANKS = [({"stage": 2}, False, 61), ({"stage": 3}, False, 0), ({"stage": 0}, False, 0)]
STEPS = [(1, "sync", True, 37), (0, "sync", False, 0), (3, "sync", True, 0), (2, "overlap", True, 0)]
ONE_IN = 41
QUICK_OR_ALL = pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])


def rows_of(table: list[Any], quick: bool) -> list[Any]:
    """A quick test leaves out rows whose last column, how many lines it goes on by, is 0."""
    return [row for row in table if row[-1] or not quick]


def interrupted_lines(stride: int, config: pytest.Config, *, quick: bool, one_in: int = ONE_IN) -> Iterable[int]:
    """The numbers of lines of a row; of a slow one, which is every line in a quarter of an hour, those of `--seed`."""
    if quick:
        return itertools.count(1, stride)
    seed = config.getoption("--seed")
    return itertools.count(1) if seed == "every" else itertools.count(1 + zlib.crc32(seed.encode()) % one_in, one_in)


@QUICK_OR_ALL
def test_a_pass_that_is_interrupted_at_any_line(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    heard: list[object] = []  # what Python cannot raise, and prints
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for settings, kept, stride in rows_of(PASSES, quick):
        tier = {"tier": zk.Nvme(tmp_path)} if settings.get("tier") == "nvme" else {}
        numbers = interrupted_lines(stride, pytestconfig, quick=quick)
        alone(partial(interrupted_passes, kept=kept), settings | tier, numbers)
        assert heard == [], settings


@each("stage", [0, 2, 3])
def test_a_move_of_gradients_that_is_interrupted_at_any_line(stage: int) -> None:
    (lines,) = alone(interrupted_moves, stage)
    assert lines > 10


def test_the_forward_after_one_that_was_broken_off_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once hooks on saved tensors are in force, and before anybody knows that it is to end them."""
    push, began = saved_hooks.push_saved_hooks, set()

    def interrupted(*given: Any) -> None:
        push(*given)
        if threading.get_ident() not in began:
            began.add(threading.get_ident())
            raise KeyboardInterrupt

    def passes(world: World) -> None:
        model = world.shard(built(small), stage=3)
        with pytest.raises(KeyboardInterrupt):
            mse(model, 0, world)
        assert saved_hooks.top_saved_hooks() is not None
        mse(model, 0, world).backward()
        assert saved_hooks.top_saved_hooks() is None
        broken = list(model.modules())[-1].register_forward_pre_hook(breaks)
        with pytest.raises(KeyboardInterrupt):
            mse(model, 0, world)
        assert sharding_of(model).runner._running
        broken.remove()
        mse(model, 0, world).backward()
        assert not sharding_of(model).runner._running

    def breaks(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_hooks, "push_saved_hooks", interrupted)
    on_threads(2, passes)


@QUICK_OR_ALL
def test_two_ranks_that_are_interrupted_at_any_line(
    quick: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Both at the same line. What they then do is right, or they are told that they are not in step."""
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    right = 0
    for settings, kept, stride in rows_of(TWO_RANKS, quick):
        for number in interrupted_lines(stride, pytestconfig, quick=quick, one_in=3 * ONE_IN):
            try:
                ended = all(on_threads(2, partial(interrupted_passes, kept=kept), settings, [number]))
            except zk.CommError:
                continue
            right += 1
            if ended:
                break
        assert heard == [], settings
    assert right >= 10


@QUICK_OR_ALL
def test_a_step_that_is_interrupted_at_any_line(
    quick: bool, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for stage, schedule, warm, stride in rows_of(STEPS, quick):
        numbers = interrupted_lines(stride, pytestconfig, quick=quick)
        alone(partial(interrupted_steps, warm=warm), {"stage": stage, "schedule": schedule}, numbers)
        assert heard == [], (stage, schedule)
