"""Random sequences of operations against a dictionary: every engine, with and without failures, swap and durable."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from io_cases import BLOCK, PAGE, EngineCase, at_offset, pattern, quick_everywhere, quick_on, read, same

from zerokern import BudgetError, IoError
from zerokern.io import Ticket
from zerokern.memory import Arena

KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
SIZES = st.sampled_from([0, 1, 511, 512, 513, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
# Leases, memory as torch gives it, and memory that no disk wants.
PLACES = st.sampled_from(["lease", 0, 64, 3])
FAILING = {"seed": 17, "fail": 1500, "fail_errno": errno.EIO}
STEPS = 50


class Put(NamedTuple):
    value: torch.Tensor
    ticket: Ticket | None  # None: it was found so when the store was opened


class Got(NamedTuple):
    key: str
    out: torch.Tensor
    ticket: Ticket
    put: Put


class Machine(RuleBasedStateMachine):
    """The store and what it should hold. Failures are allowed where they are made, and must be told by the ticket."""

    def __init__(self, case: EngineCase, durable: bool, failing: bool, counts: list[int]) -> None:
        super().__init__()
        self.case, self.durable, self.failing, self.counts = case, durable, failing, counts
        self.folder = Path(tempfile.mkdtemp())
        self.arena, self.leases = Arena(4 << 20, poison=True), []
        self.held: dict[str, Put] = {}
        self.synced: dict[str, Put] = {}
        self.gots: list[Got] = []
        self.puts: list[Put] = []
        self.seed = 0
        self.open()

    def open(self) -> None:
        settings = {"durable": self.durable, "checksum": True, "arena": self.arena}
        faults = FAILING if self.failing else {}
        self.store = self.case.open(self.folder, budget="4M" if self.durable else "1M", faults=faults, **settings)

    def memory(self, nbytes: int, place: str | int) -> torch.Tensor:
        if place != "lease" or not nbytes:
            return at_offset(nbytes, 0 if place == "lease" else int(place))
        try:
            self.leases.append(self.arena.lease(nbytes, "model"))
            return self.leases[-1].tensor()
        except BudgetError:
            self.everything_ends()
            return self.memory(nbytes, place)

    @rule(key=KEYS, nbytes=SIZES, place=PLACES, wait=st.booleans())
    def put(self, key: str, nbytes: int, place: str | int, wait: bool) -> None:
        self.counts[0] += 1
        self.seed += 1
        value = pattern(nbytes, self.seed)
        memory = self.memory(nbytes, place)
        memory.copy_(value)
        try:
            ticket = self.store.put(key, memory)
        except BudgetError:
            assert self.durable, "five keys fit into the budget of a store that keeps nothing twice"
            return
        self.held[key] = Put(value, ticket)
        self.puts.append(self.held[key])
        if wait:
            self.check_put(self.held[key])

    @rule(key=KEYS, place=PLACES, wait=st.booleans(), after=st.booleans())
    def get(self, key: str, place: str | int, wait: bool, after: bool) -> None:
        self.counts[0] += 1
        if key not in self.held:
            with pytest.raises(KeyError):
                self.store.get(key, torch.empty(1, dtype=torch.uint8))
            return
        put = self.held[key]
        out = self.memory(put.value.numel(), place)
        behind = self.puts[-1].ticket if after and self.puts else None
        if behind is not None and behind._transfers is not self.store._transfers:
            behind = None
        try:
            ticket = self.store.get(key, out, after=behind)
        except IoError:
            assert self.failing and put.ticket is not None and failed(put.ticket)
            return
        self.gots.append(Got(key, out, ticket, put))
        if wait:
            self.check_get(self.gots.pop())

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.counts[0] += 1
        if key in self.held:
            self.store.delete(key)
            del self.held[key]
        else:
            with pytest.raises(KeyError):
                self.store.delete(key)

    @rule()
    def everything_ends(self) -> None:
        self.counts[0] += 1
        for put in self.puts:
            self.check_put(put)
        for got in self.gots:
            self.check_get(got)
        self.puts.clear()
        self.gots.clear()
        while self.leases:
            self.leases.pop().release()
        assert self.store.keys() == list(self.held)
        assert self.store.nbytes == sum(put.value.numel() for put in self.held.values())

    @rule()
    def sync(self) -> None:
        self.everything_ends()
        if self.durable and any(failed(put.ticket) for put in self.held.values()):
            with pytest.raises(IoError, match="the last put of"):
                self.store.sync()
            return
        self.store.sync()
        self.synced = dict(self.held)

    @rule(well=st.booleans())
    def reopen(self, well: bool) -> None:
        """In order, or as after an exception: then a durable store goes back to what was synced."""
        self.sync()
        if well and self.synced == self.held:
            self.store.close()
        else:
            self.store.__exit__(RuntimeError, None, None)
        self.open()
        self.synced = {key: Put(put.value, None) for key, put in self.synced.items()} if self.durable else {}
        self.held = dict(self.synced)
        assert set(self.store.keys()) == set(self.held)
        self.held = {key: self.held[key] for key in self.store.keys()}  # noqa: SIM118

    def check_put(self, put: Put) -> None:
        if failed(put.ticket):
            assert self.failing
            self.counts[1] += 1

    def check_get(self, got: Got) -> None:
        if failed(got.ticket):
            assert self.failing
        else:
            assert not failed(got.put.ticket), "a get gave bytes of a put that failed"
            assert same(got.out, got.put.value)

    def teardown(self) -> None:
        self.everything_ends()
        if not self.failing:
            for key, put in self.held.items():
                assert same(read(self.store, key, put.value), put.value)
        self.store.__exit__(RuntimeError, None, None)
        self.arena.close(force=True)
        shutil.rmtree(self.folder)


def failed(ticket: Ticket | None) -> bool:
    try:
        if ticket is not None:
            ticket.wait()
    except IoError:
        return True
    return False


def run(case: EngineCase, durable: bool, failing: bool, examples: int) -> int:
    counts = [0, 0]
    run_state_machine_as_test(
        lambda: Machine(case, durable, failing, counts),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert failing or not counts[1]
    return counts[0]


@pytest.mark.parametrize("failing", [False, True], ids=["", "failing"])
@pytest.mark.parametrize("durable", [False, True], ids=["swap", "durable"])
@quick_everywhere
def test_a_store_is_a_dictionary(engine: EngineCase, durable: bool, failing: bool) -> None:
    assert run(engine, durable, failing, examples=2) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True], ids=["", "failing"])
@pytest.mark.parametrize("durable", [False, True], ids=["swap", "durable"])
def test_thousands_of_operations(engine: EngineCase, durable: bool, failing: bool) -> None:
    """250 for each of both engines, two kinds of store and two kinds of weather."""
    assert run(engine, durable, failing, examples=8) >= 250


@quick_on("threads")
def test_failures_do_happen(engine: EngineCase) -> None:
    """Else the rows named so would prove nothing."""
    counts = [0, 0]
    machine = Machine(engine, False, True, counts)
    for i in range(200):
        machine.put("abcde"[i % 5], 2 * BLOCK + 77, 64, i % 3 == 0)
        machine.get("abcde"[i * 7 % 5], 3, i % 2 == 0, True)
    machine.everything_ends()
    machine.teardown()
    assert counts[1] > 3
