"""The states of a unit: every move from every state, whether it is legal or raises, and what a failure leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import World, alone, built, everywhere, on_threads, ranked, refusal

import zerokern as zk
from zerokern.api import sharding_of
from zerokern.zero.params import BucketMemory
from zerokern.zero.unit import GATHERING, REDUCING, SHARDED, WHOLE, Unit, UnitState

NUMEL = 16
TO: dict[UnitState, list[str]] = {  # the moves to each state
    SHARDED: [],
    GATHERING: ["unshard"],
    WHOLE: ["unshard", "wait_for_unshard"],
    REDUCING: ["unshard", "wait_for_unshard", "collect"],
}
LEGAL: dict[tuple[UnitState, str], UnitState] = {
    (SHARDED, "unshard"): GATHERING,
    (GATHERING, "unshard"): GATHERING,
    (WHOLE, "unshard"): WHOLE,
    (REDUCING, "unshard"): WHOLE,
    (GATHERING, "wait_for_unshard"): WHOLE,
    (WHOLE, "wait_for_unshard"): WHOLE,
    (WHOLE, "collect"): REDUCING,
    **{(state, "reshard"): SHARDED for state in UnitState},
}
MOVES = list(itertools.product(UnitState, ("unshard", "wait_for_unshard", "collect", "reshard")))


def unit_of(world: World, number: int = 1) -> tuple[nn.Module, Unit]:
    model = built(lambda: nn.Sequential(nn.Linear(NUMEL, NUMEL), nn.Linear(NUMEL, NUMEL)))
    world.shard(model, stage=3, units=list(model))
    runner = sharding_of(model).runner
    assert runner is not None
    return model, runner.units[number]


def move(unit: Unit, *verbs: str) -> None:
    for verb in verbs:
        getattr(unit, verb)()


def memory_of(unit: Unit) -> int:
    return sum(memory.full.untyped_storage().nbytes() for memory in unit.memories)


@ranked
def every_move(world: World) -> list[tuple[UnitState, str, UnitState | str]]:
    found: list[tuple[UnitState, str, UnitState | str]] = []
    _, unit = unit_of(world)
    for state, verb in MOVES:
        move(unit, *TO[state])
        assert unit.state is state
        if (state, verb) in LEGAL:
            move(unit, verb)
            found.append((state, verb, unit.state))
        else:
            found.append((state, verb, refusal(lambda verb=verb: move(unit, verb), zk.StateError)))
            assert unit.state is state, "a move that raises changes nothing"
        move(unit, "reshard")
    return found


def check(found: list[tuple[UnitState, str, UnitState | str]]) -> None:
    assert len(found) == len(MOVES) == 16
    for state, verb, result in found:
        if isinstance(result, UnitState):
            assert LEGAL[state, verb] is result, (state, verb)
        else:
            assert (state, verb) not in LEGAL
            allowed = "WHOLE" if verb == "collect" else "GATHERING or WHOLE"
            for word in (f"{verb}() of unit '0'", f"which is {state.name} (", f"must be {allowed}"):
                assert word in result


def test_every_move_from_every_state() -> None:
    for found in on_threads(2, every_move):
        check(found)


def test_the_table_of_the_class_is_that_of_the_tests() -> None:
    assert {(state, verb) for verb, states in Unit.LEGAL.items() for state in states} == set(LEGAL)


@ranked
def memory_by_state(world: World) -> list[tuple[str, int, bool, bool]]:
    _, unit = unit_of(world)
    found = []
    for verb in ("reshard", "unshard", "wait_for_unshard", "collect", "reshard"):
        move(unit, verb)
        found.append((unit.state.name, memory_of(unit), unit.is_sharded, unit.is_whole))
    return found


def test_full_parameters_take_memory_from_unshard_to_reshard() -> None:
    full = NUMEL * NUMEL + NUMEL
    for found in on_threads(2, memory_by_state):
        assert [(name, sharded, whole) for name, _, sharded, whole in found] == [
            ("SHARDED", True, False),
            ("GATHERING", False, False),
            ("WHOLE", False, True),
            ("REDUCING", False, True),
            ("SHARDED", True, False),
        ]
        assert [nbytes >= 4 * full for _, nbytes, _, _ in found] == [False, True, True, True, False]
        assert found[0][1] == found[-1][1] == 0


def moves_of(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> list[UnitState]:
    """The states that a unit passes through from here on."""
    states = [unit.state]

    def noted(verb: str) -> Callable[[Unit], None]:
        original = getattr(Unit, verb)

        def call(one: Unit) -> None:
            original(one)
            if one is unit and states[-1] is not one.state:
                states.append(one.state)

        return call

    for verb in ("unshard", "wait_for_unshard", "collect", "reshard"):
        monkeypatch.setattr(Unit, verb, noted(verb))
    return states


@ranked
def states_of_a_step(world: World, number: int) -> list[UnitState]:
    with pytest.MonkeyPatch.context() as patch:
        model, unit = unit_of(world, number)
        model(torch.ones(2, NUMEL)).sum().backward()  # the order is known from here on
        states = moves_of(unit, patch)
        model(torch.ones(2, NUMEL)).sum().backward()
        return states


def test_a_step_goes_through_the_states_in_order() -> None:
    """The first unit of two is resharded after its forward; nothing comes after its backward that would collect it."""
    first, last = ([SHARDED, GATHERING, WHOLE, *between] for between in ([SHARDED, GATHERING, WHOLE], [REDUCING]))
    for number, expected in ((1, first), (2, last)):
        for states in on_threads(2, states_of_a_step, number):
            assert states == [*expected, SHARDED]


@ranked
def reshard_within_a_forward(world: World) -> str:
    model, unit = unit_of(world)
    said: list[str] = []
    model[0].register_forward_hook(lambda *_: said.append(refusal(unit.reshard, zk.StateError)), prepend=True)
    model(torch.ones(2, NUMEL))
    return said[0]


def test_a_unit_is_not_resharded_within_its_forward() -> None:
    for said in on_threads(2, reshard_within_a_forward):
        assert "reshard() of unit '0', which is WHOLE" in said


@ranked
def failing_gather(world: World) -> tuple[str, UnitState, UnitState, UnitState]:
    _, unit = unit_of(world)
    gather = unit.memories[0].gather

    def broken() -> Any:
        raise zk.IoError("no")

    unit.memories[0].gather = broken  # type: ignore[method-assign]
    said = refusal(unit.unshard)
    failed = unit.state
    unit.memories[0].gather = gather  # type: ignore[method-assign]
    unit.reshard()
    again = unit.state
    move(unit, "unshard", "wait_for_unshard")
    return said, failed, again, unit.state


@ranked
def failing_allocation(world: World) -> tuple[UnitState, UnitState, Tensor | None]:
    _model, unit = unit_of(world)
    allocate = unit.memories[0].allocate

    def broken() -> Any:
        raise torch.OutOfMemoryError("no")

    unit.memories[0].allocate = broken  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        unit.unshard()
    failed = unit.state
    unit.memories[0].allocate = allocate  # type: ignore[method-assign]
    move(unit, "unshard", "wait_for_unshard")
    return failed, unit.state, unit.entries[0].full.detach().clone() if memory_of(unit) else None


def test_memory_that_could_not_be_allocated_is_asked_for_again() -> None:
    """A unit that is GATHERING without its memory, as after Ctrl-C, is gathered by who next needs it."""
    expected = built(lambda: nn.Sequential(nn.Linear(NUMEL, NUMEL), nn.Linear(NUMEL, NUMEL)))[0].weight
    for failed, then, full in on_threads(2, failing_allocation):
        assert (failed, then) == (GATHERING, WHOLE)
        assert full is not None and torch.equal(full, expected)


@ranked
def interrupted_note(world: World, after: bool) -> list[int]:
    """Ctrl-C where a view of a full parameter is about to be kept, or has just been."""
    model, unit = unit_of(world, 2)  # of the first one, autograd saves no weight
    keep, left = BucketMemory.keep, [True]

    def interrupted(memory: BucketMemory, view: Tensor) -> Tensor | None:
        kept = keep(memory, view) if after or not left else None
        if left:
            left.clear()
            raise KeyboardInterrupt
        return kept

    for memory in unit.memories:
        memory.keep = partial(interrupted, memory)  # type: ignore[method-assign]
    x = torch.ones(2, NUMEL)
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    found = []
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
        found.append(memory_of(unit))
    return found


@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_as_a_view_is_kept_leaves_no_memory_behind(after: bool) -> None:
    for found in on_threads(2, interrupted_note, after):
        assert found == [0, 0, 0]


def test_a_gather_that_could_not_be_launched_is_ended_by_reshard() -> None:
    for said, failed, again, then in on_threads(2, failing_gather):
        assert (said, failed, again, then) == ("no", GATHERING, SHARDED, WHOLE)


@ranked
def alone_nothing_moves(world: World) -> list[tuple[str, bool]]:
    _, unit = unit_of(world)
    pointer = unit.memories[0].full.data_ptr()
    found = []
    for verb in ("unshard", "wait_for_unshard", "collect", "unshard", "reshard"):
        move(unit, verb)
        found.append((unit.state.name, unit.memories[0].full.data_ptr() == pointer))
    return found


def test_on_one_rank_nothing_moves() -> None:
    (found,) = alone(alone_nothing_moves)
    assert found == [(name, True) for name in ("WHOLE", "WHOLE", "REDUCING", "WHOLE", "SHARDED")]


class Keeping(nn.Module):
    """A unit whose rank may keep a view of its full parameters, in which one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.unused = nn.Parameter(torch.ones(4))
        self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps:
            self.__dict__["kept"] = self.weight.detach().view(-1)
        return torch.tanh(x @ self.weight)


class Ordered(nn.Module):
    """Units in an order that may change; a hook may run another unit's forward within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Keeping() for _ in range(6))
        self.order = range(6)
        self.within: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.units[number](x)
            if number == self.within:
                x.register_hook(self.scale)
        return x

    def scale(self, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return grad * self.units[3](torch.ones(2, 4)).sum()


@everywhere(2, change=["order", "forward within backward"])
def test_memory_that_one_rank_keeps_changes_no_order_of_collectives(world: World, change: str) -> None:
    ours, plain = world.shard(built(Ordered), stage=3), built(Ordered)
    for number in [0] if change == "order" else range(6):
        ours.units[number].keeps = world.rank == 0
    for step in range(6):
        losses = []
        for model in (ours, plain):
            if change == "order":
                model.order = [5, 4, 3, 0, 1, 2, 0] if step < 4 else [5, 4, 3, 1, 2, 0]
            else:
                model.within = 1 if step > 1 else None
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad.span, mine.grad.span_of(theirs.grad))
        for model in (ours, plain):
            model.zero_grad()
