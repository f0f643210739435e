"""The meeting of ranks in a step: what several groups say is read at once, and each rank hears of each failure."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fake_world import FakeWorld
from tables import each
from torch import Tensor

from zerokern import StateError
from zerokern.optim.accord import Accord

ROWS = COLUMNS = 2


def meet(accord_of: Any) -> list[Any]:
    """What `accord_of(rank, row, column, everyone)` returns on each of four ranks, which meet in rows, then columns."""
    everyone = FakeWorld(ROWS * COLUMNS, timeout=60.0)
    rows = [FakeWorld(COLUMNS, timeout=60.0) for _ in range(ROWS)]
    columns = [FakeWorld(ROWS, timeout=60.0) for _ in range(COLUMNS)]

    def one(group: Any) -> Any:
        row, column = divmod(group.rank, COLUMNS)
        return accord_of(group.rank, rows[row].groups[column], columns[column].groups[row], group)

    return everyone.run(one)


def accord_of(row: Any, column: Any, everyone: Any, *, party: bool) -> Accord:
    """Parameters that rows divide, and others that columns do; as a party the columns are stages of a pipeline."""
    teams = [row] if party else [row, column]
    made = Accord([SimpleNamespace(teams=teams, everyone=everyone)], column if party else None)
    made.share_out([SimpleNamespace(team=team, copies=1) for team in teams])
    return made


@each("party", [False, True])
def test_all_of_them_are_read_at_once(party: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> list:
        reads.append(threading.current_thread().name)
        return tolist(self)

    def total(rank: int, *groups: Any) -> float:
        accord = accord_of(*groups, party=party)
        accord.makes_state = rank == 3
        before = reads.count(threading.current_thread().name)
        found = accord.total([1.0, 10.0**rank, 10.0**rank][: 3 - party], skip=False)
        assert reads.count(threading.current_thread().name) == before + 1
        assert accord._anyone_makes_state
        return found

    monkeypatch.setattr(Tensor, "tolist", counted)
    found = meet(total)
    rows = [10.0**rank + 10.0 ** (rank ^ 1) for rank in range(4)]
    if party:  # each stage's own sum, and that of the ranks that divide it, over the stages
        assert found == [2.0 + rows[rank] + rows[rank ^ 2] for rank in range(4)]
    else:
        assert found == [1.0 + rows[rank] + 10.0**rank + 10.0 ** (rank ^ 2) for rank in range(4)]


@each("party", [False, True])
@each("failing", range(4))
@each("first", [False, True])
def test_each_rank_hears_of_a_failure(failing: int, party: bool, first: bool) -> None:
    """Also the one that shares no group with the rank that failed. In the first step they hear where they compare."""

    def step(rank: int, *groups: Any) -> str:
        accord = accord_of(*groups, party=party)
        if not first:
            accord.compare(there=False)
            accord.begin()
        if rank == failing:
            accord.refuse("the disk is full", torn=False, reports=False, there=False)
            return "the disk is full"
        call = partial(accord.compare, there=False) if first else partial(accord.total, [0.0] * (3 - party), skip=False)
        with pytest.raises(StateError) as caught:
            call()
        return str(caught.value)

    assert all("the disk is full" in said for said in meet(step))


@each("party", [False, True])
def test_one_that_skips_makes_all_skip(party: bool) -> None:
    def total(rank: int, *groups: Any) -> float:
        return accord_of(*groups, party=party).total([1.0] * (3 - party), skip=rank == 1)

    found = meet(total)
    assert [one == float("inf") for one in found] == ([True] * 4 if party else [True, True, False, True])
