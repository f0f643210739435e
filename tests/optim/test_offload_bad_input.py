"""What an optimizer on the host is asked for that cannot be, and a worker that fails."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import pytest
import torch
from offload_cases import Row, agree, backward, copied, optimizer_of, train, values
from optim_cases import same_bits
from tables import each
from worlds import World

import zerokern as zk
from zerokern.core.errors import BudgetError, StateError
from zerokern.kernels.cpu import UpdateTable
from zerokern.memory import room
from zerokern.optim.hosted import HostCopies

WORLD = World(0, 1)
ROW = Row(dtype="bf16", steps=8)


def begun(row: Row, schedule: Any, world: World = WORLD) -> tuple[torch.nn.Module, Any]:
    model = row.model(world)
    return model, optimizer_of(row, model, tier="cpu", schedule=schedule)


class Struck(RuntimeError):
    pass


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next native update raises where it runs, as often as the list's first number says; as often as the second
    does, what writes a delayed update to the parameters.
    """
    left = [0, 0]
    run, put = UpdateTable._call, HostCopies.put

    def struck(self: UpdateTable, *arguments: Any, **settings: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise Struck("the update of the worker")
        run(self, *arguments, **settings)

    def half_way(self: HostCopies, updated: Any) -> Any:
        if left[1]:
            left[1] -= 1
            raise Struck("parameters are being written")
        return put(self, updated)

    monkeypatch.setattr(HostCopies, "put", half_way)
    monkeypatch.setattr(UpdateTable, "_call", struck)
    return left


@each("call, what", [("step", 0), ("flush", 0), ("state_dict", 0), ("pickle", 0), ("step", 1), ("flush", 1)])
def test_a_worker_that_fails_raises_in_the_next_call_with_its_own_traceback(
    call: str, what: int, strike: list[int]
) -> None:
    """So does what publishes an update, here in that call itself."""
    model, optimizer = begun(ROW, zk.Delayed())
    train(WORLD, ROW, model, optimizer, range(3))
    kept, states = copy.deepcopy(model.state_dict()), copied(optimizer.state_dict())
    backward(WORLD, ROW, model, 3)
    strike[0] = 1 - what
    optimizer.step()
    strike[1] = what
    model.zero_grad()
    backward(WORLD, ROW, model, 4)
    calls = {"pickle": lambda: copy.deepcopy(optimizer)}
    with pytest.raises(Struck) as caught:
        calls.get(call, lambda: getattr(optimizer, call)())()
    assert ("struck", "half_way")[what] in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    for refused in (optimizer.step, optimizer.state_dict, optimizer.flush):
        with pytest.raises(StateError, match="broken off"):
            refused()
    go_on_from(model, optimizer, kept, states)


def go_on_from(model: Any, optimizer: Any, weights: Any, states: Any) -> None:
    """What was saved after three steps, loaded, goes on as if nothing had been."""
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    model.zero_grad()
    straight, other = begun(ROW, zk.Delayed())
    train(WORLD, ROW, straight, other, range(3))
    rest = range(3, ROW.steps)
    agree(train(WORLD, ROW, model, optimizer, rest), train(WORLD, ROW, straight, other, rest))


@each(
    "wrong, kind, words",
    [
        ("async", ValueError, ["schedule='async'", "'sync'", "'overlap'", "zk.Delayed(after=N)"]),
        ("delayed", ValueError, ["schedule='delayed'", "zk.Delayed(after="]),
        (None, TypeError, ["schedule=None", "'sync'"]),
        (3, TypeError, ["schedule=3", "'sync'"]),
        (zk.Delayed, TypeError, ["schedule=", "zk.Delayed(after="]),
    ],
)
def test_schedules_that_do_not_exist(wrong: Any, kind: type, words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        begun(ROW, wrong)
    assert not [word for word in words if word not in str(caught.value)], caught.value


@each("after, kind", [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("3", TypeError)])
def test_numbers_of_exact_steps_that_are_none(after: Any, kind: type) -> None:
    with pytest.raises(kind, match="after="):
        zk.Delayed(after=after)


@each("schedule", ["sync", "overlap", zk.Delayed()])
def test_more_than_the_machine_has_is_refused_before_anything_is_taken(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the table of what was asked for; and with more room, the step is done."""
    model, optimizer = begun(ROW, schedule)
    backward(WORLD, ROW, model, 0)
    before = values(model)
    monkeypatch.setattr(room, "memory_left", lambda: {"free memory and swap": 4096})
    with pytest.raises(BudgetError) as caught:
        optimizer.step()
    for word in ("exp_avg", "exp_avg_sq", "remainder", "4,096 B"):
        assert word in str(caught.value), caught.value
    assert same_bits(values(model), before) and not optimizer.state
    monkeypatch.undo()
    optimizer.step()
    model.zero_grad()
    assert not same_bits(values(model), before) or isinstance(schedule, zk.Delayed)
