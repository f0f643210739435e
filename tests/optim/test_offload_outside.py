"""What people do to an optimizer, its gradients and its parameters while an update is under way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from offload_cases import (
    SCHEDULES,
    ByHand,
    Row,
    agree,
    backward,
    copied,
    exact_calls,
    one_thread,
    optimizer_of,
    train,
    values,
)
from optim_cases import same_bits
from tables import each
from worlds import World, on_threads

import zerokern as zk
from zerokern.core.errors import StateError

WORLD = World(0, 1)
ROW = Row(dtype="bf16", steps=6)


EACH = each("schedule", [SCHEDULES["overlap"], SCHEDULES["delayed"]])


def begun(row: Row, schedule: Any, seed: int = 0, **settings: Any) -> tuple[torch.nn.Module, Any]:
    model = row.model(WORLD, seed)
    return model, optimizer_of(row, model, tier="cpu", schedule=schedule, **settings)


def reference(row: Row, schedule: Any) -> ByHand:
    """The loop by hand that a schedule stands for: exact ones are never late."""
    return ByHand(row, WORLD, exact_calls(schedule))


def both(row: Row, schedule: Any) -> Iterator[tuple[torch.nn.Module, Any, list]]:
    """The loop by hand and ours, each with what has been published, to do the same with."""
    hand = reference(row, schedule)
    yield hand.model, hand, [hand.ahead]
    model, optimizer = begun(row, schedule)
    yield model, optimizer, []


def follow(row: Row, schedule: Any, work: Callable[[torch.nn.Module, Any, list], Any]) -> None:
    """The same is done to both between the steps 0-2 and 3-7."""
    traces = []
    for model, optimizer, others in both(row, schedule):
        train(WORLD, row, model, optimizer, range(3))
        work(model, optimizer, others)
        traces.append(train(WORLD, row, model, optimizer, range(3, row.steps)))
    agree(traces[1], traces[0], ahead=True)


@each("dtype", ["fp32", "bf16"])
@each("before_backward", [True, False])
def test_a_parameter_written_during_a_pending_update_keeps_what_was_written(dtype: str, before_backward: bool) -> None:
    """Its pending value is dropped with one warning, its moments stay; the others are published."""
    row = Row(dtype=dtype, steps=8)

    def work(model: torch.nn.Module, optimizer: Any, others: list) -> None:
        if not before_backward:
            backward(WORLD, row, model, 3)
        with torch.no_grad():
            for one in (model, *others):
                one.blocks[1].up.weight.fill_(0.25)
        if not before_backward:
            optimizer.step()
            model.zero_grad()

    with pytest.warns(UserWarning, match=r"(?s)written.*flush") as caught:
        follow(row, zk.Delayed(), work)
    assert len([one for one in caught if "written" in str(one.message)]) == 1


@EACH
def test_a_parameter_written_while_nothing_is_pending_is_followed_without_a_word(schedule: Any) -> None:
    def work(model: torch.nn.Module, optimizer: Any, others: list) -> None:
        optimizer.flush() if hasattr(optimizer, "flush") else None
        with torch.no_grad():
            for one in (model, *others):
                one.blocks[1].up.weight.mul_(0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="schedule=.overlap. hides nothing here")  # in host memory
        follow(ROW, schedule, work)


class Broken(RuntimeError):
    pass


@each("when", ["in backward", "after backward", "in the closure"])
@EACH
def test_an_exception_between_backward_and_step_costs_that_step_only(schedule: Any, when: str) -> None:
    """Gradients that have left for the host already are those of nobody."""

    def strike(grad: torch.Tensor) -> None:
        raise Broken

    def interrupted(model: torch.nn.Module, optimizer: Any, others: list) -> None:
        handle = model.enter.weight.register_hook(strike) if when == "in backward" else None
        if when == "in the closure" and not isinstance(optimizer, ByHand):
            with pytest.raises(Broken):
                optimizer.step(lambda: [backward(WORLD, ROW, model, 77), strike(torch.ones(1))])
        elif handle is not None:
            with pytest.raises(Broken):
                backward(WORLD, ROW, model, 77)
            handle.remove()
        else:
            backward(WORLD, ROW, model, 77)
        model.zero_grad()

    follow(ROW, schedule, interrupted)


@each(
    "source, into",
    [
        ("sync", "overlap"),
        ("overlap", "delayed after 2"),
        ("delayed", "sync"),
        ("delayed after 2", "overlap"),
        ("delayed", "delayed after 2"),
    ],
)
def test_loaded_into_another_schedule(source: str, into: str) -> None:
    """Nothing is substituted: what is pending needs a schedule that has such a thing. Exact calls are counted from
    the first call, or from the load where the checkpoint did not count."""
    hand, late = reference(ROW, SCHEDULES[source]), isinstance(SCHEDULES[into], zk.Delayed)
    train(WORLD, ROW, hand.model, hand, range(4))
    model, optimizer = begun(ROW, SCHEDULES[source])
    train(WORLD, ROW, model, optimizer, range(4))
    if not late and isinstance(SCHEDULES[source], zk.Delayed):
        again, other = begun(ROW, SCHEDULES[into], seed=4)
        with pytest.raises(StateError, match=r"pending.*Delayed.*flush"):
            other.load_state_dict(optimizer.state_dict())
        assert not other.state
        for one in (hand, optimizer):
            one.flush()
    again, other = begun(ROW, SCHEDULES[into], seed=4)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copied(optimizer.state_dict()))
    if not late:
        hand.after = 10**9
    elif isinstance(SCHEDULES[source], zk.Delayed):
        hand.after = 0
    else:
        hand.after = hand.calls + SCHEDULES[into].after
    rest = range(4, ROW.steps)
    agree(train(WORLD, ROW, again, other, rest), train(WORLD, ROW, hand.model, hand, rest), ahead=True)


def write_under_an_update(world: World, wrap: str) -> None:
    row, found = Row(wrap, "bf16"), []
    for schedule in ("sync", "overlap"):
        model = row.model(world)
        optimizer = optimizer_of(row, model, tier="cpu", schedule=schedule)
        try:
            for step in range(2):
                with one_thread():
                    backward(world, row, model, 3)
                    optimizer.step()
                    model.zero_grad()
                if not step:
                    with torch.no_grad():
                        model.blocks[1].up.weight.mul_(0.5)
        except StateError as error:
            said = str(error)
            assert schedule == "overlap" and "blocks.1.up.weight" in said and "flush" in said
            assert wrap != "stage 3", "there the write itself can wait"
            return
        optimizer.flush()
        found.append(values(model))
    assert same_bits(*found)


@each("wrap", ["stage 0", "stage 2", "stage 3"])
def test_parameters_written_under_an_update_are_not_mixed_with_it(wrap: str, slow_cpu: None) -> None:
    """Either the update is over, and what was written counts; or nobody can tell the two apart, and nothing goes on."""
    on_threads(2, write_under_an_update, wrap)
