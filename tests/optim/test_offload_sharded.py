"""What people do to a model under zk.shard while an update of it is under way."""

from __future__ import annotations

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
    one_thread,
    optimizer_of,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from torch import nn
from worlds import World, on_threads

from zerokern.core.errors import StateError

EACH = each("schedule, wrap", [("overlap", "stage 2"), ("delayed", "stage 3")])


def row_of(wrap: str, **settings: Any) -> Row:
    return Row(wrap, "bf16", **{"steps": 6, **settings})


def reference(world: World, row: Row, schedule: Any) -> ByHand:
    return ByHand(row, world, exact_calls(schedule))


def begun(world: World, row: Row, schedule: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = row.model(world, seed)
    return model, optimizer_of(row, model, tier="cpu", schedule=schedule)


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
def test_parameters_written_under_an_update_are_not_mixed_with_it(wrap: str, slow_cpu: None) -> None:
    on_threads(2, write_outside, row_of(wrap))
