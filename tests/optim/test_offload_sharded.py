"""What people do to a model under zk.shard while an update of it is under way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    ByHand,
    Row,
    agree,
    backward,
    exact_calls,
    loads_back,
    one_thread,
    optimizer_of,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from torch import nn
from worlds import World, on_threads

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.kernels.cpu import UpdateTable

EACH = each("schedule, wrap", [("overlap", "stage 2"), ("delayed", "stage 3")])


def row_of(wrap: str, **settings: Any) -> Row:
    return Row(wrap, "bf16", **{"steps": 6, **settings})


def reference(world: World, row: Row, schedule: Any) -> ByHand:
    return ByHand(row, world, exact_calls(schedule))


def begun(world: World, row: Row, schedule: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = row.model(world, seed)
    return model, optimizer_of(row, model, tier="cpu", schedule=schedule)


def keep_gradients(world: World, row: Row, schedule: Any) -> None:
    """The memory of gradients is zeroed as soon as step() has returned."""
    hand = reference(world, row, schedule)
    expected = train(world, row, hand.model, hand)
    for through_optimizer in (True, False):
        model, optimizer = begun(world, row, schedule)
        owner = optimizer if through_optimizer else copy.copy(model)
        clear = type(owner).zero_grad
        model.zero_grad = lambda owner=owner, clear=clear: clear(owner, set_to_none=False)  # type: ignore[method-assign]
        agree(train(world, row, model, optimizer), expected, ahead=True)


@EACH
def test_zero_grad_that_keeps_gradients(schedule: str, wrap: str) -> None:
    on_threads(2, keep_gradients, row_of(wrap, accumulate=2), SCHEDULES[schedule])


def fail_between(world: World, row: Row, schedule: Any, when: str) -> None:
    hand = reference(world, row, schedule)
    model, optimizer = begun(world, row, schedule)
    traces = []
    for one, loop in ((hand.model, hand), (model, optimizer)):
        train(world, row, one, loop, range(3))
        if when == "in forward":
            handle = one.blocks[1].down.register_forward_pre_hook(strike)
        elif when == "in backward":
            handle = one.blocks[0].down.register_full_backward_hook(strike)
        else:
            handle = one.register_forward_hook(lambda *_: None)
            with one_thread():
                backward(world, row, one, 99)
        if when != "after backward":
            with pytest.raises(ZeroDivisionError):
                backward(world, row, one, 99)
        handle.remove()
        one.zero_grad()
        traces.append(train(world, row, one, loop, range(3, row.steps)))
    agree(traces[1], traces[0], ahead=True)


def strike(*arguments: Any) -> None:
    raise ZeroDivisionError


@each("when", ["in backward", "in forward", "after backward"])
@EACH
def test_an_exception_between_two_steps_costs_that_step_only(schedule: str, wrap: str, when: str) -> None:
    on_threads(2, fail_between, row_of(wrap), SCHEDULES[schedule], when)


def load_back(world: World, row: Row, schedule: Any) -> None:
    loads_back(world, row, *begun(world, row, schedule))


@EACH
@pytest.mark.filterwarnings("ignore:.*written while an update")
def test_a_checkpoint_loaded_while_an_update_is_under_way(schedule: str, wrap: str) -> None:
    on_threads(2, load_back, row_of(wrap), SCHEDULES[schedule])


def write_inside(world: World, row: Row, schedule: Any) -> None:
    """Inside of zk.gathered(write=True) whatever is under way has been waited for."""
    hand = reference(world, row, schedule)
    model, optimizer = begun(world, row, schedule)
    traces = []
    for one, loop, others in ((hand.model, hand, [hand.ahead]), (model, optimizer, [])):
        train(world, row, one, loop, range(3))
        if isinstance(schedule, zk.Delayed):
            loop.flush()
        for copy_of in (one, *others):
            with zk.gathered(copy_of, write=True), torch.no_grad():
                copy_of.blocks[1].up.weight.fill_(0.125)
        traces.append(train(world, row, one, loop, range(3, row.steps)))
    agree(traces[1], traces[0], ahead=True)


@EACH
def test_parameters_written_while_gathered(schedule: str, wrap: str) -> None:
    on_threads(2, write_inside, row_of(wrap), SCHEDULES[schedule])


def write_outside(world: World, row: Row) -> None:
    """Either the update is over, and what was written counts; or nobody can tell the two apart, and nothing goes on."""
    hand = reference(world, row, "overlap")
    train_one(world, row, hand.model, hand)
    halve(hand.model, hand.ahead)
    train_one(world, row, hand.model, hand)
    model, optimizer = begun(world, row, "overlap")
    train_one(world, row, model, optimizer)
    halve(model)
    said = told(lambda: train_one(world, row, model, optimizer))
    if said:
        assert "blocks.1.up.weight" in said and "flush" in said
        assert row.wrap != "stage 3", "there the write itself can wait"
        return
    optimizer.flush()
    assert same_bits(values(model), values(hand.model))


def halve(*models: nn.Module) -> None:
    with torch.no_grad():
        for model in models:
            model.blocks[1].up.weight.mul_(0.5)


def told(work: Callable[[], object]) -> str:
    """What a refusal says; empty where there is none."""
    try:
        work()
    except StateError as error:
        return str(error)
    return ""


def train_one(world: World, row: Row, model: nn.Module, optimizer: Any) -> None:
    with one_thread():
        backward(world, row, model, 3)
        optimizer.step()
        model.zero_grad()


@each("wrap", ["stage 0", "stage 2", "stage 3"])
def test_parameters_written_under_an_update_are_not_mixed_with_it(wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = UpdateTable.run

    def slowly(self: UpdateTable, *arguments: Any, **settings: Any) -> None:
        time.sleep(0.01)
        run(self, *arguments, **settings)

    monkeypatch.setattr(UpdateTable, "run", slowly)
    on_threads(2, write_outside, row_of(wrap))
