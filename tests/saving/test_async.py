"""zk.save(wait=False): what was there when it returned is what is saved, whatever training does meanwhile."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import BF16, Case, load, same, save
from torch import nn
from tries import best
from worlds import on_ranks

import zerokern as zk
from zerokern.core.errors import BudgetError, IoError
from zerokern.saving import Saving, background
from zerokern.saving.storage import Writer


class Gate:
    """Holds writers until it is opened; lets them fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error: Exception | None = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every writer waits here before it writes its first byte that is not streamed from a disk."""
    gate = Gate()
    write = Writer.write_data

    def held(self: Writer, plan: Any, planner: Any) -> Any:
        gate.reached.set()
        if not getattr(planner, "_streams", True):
            assert gate.open.wait(120)
        if gate.error is not None:
            raise gate.error
        return write(self, plan, planner)

    monkeypatch.setattr(Writer, "write_data", held)
    yield gate
    gate.open.set()


CASES = {
    "plain": Case(),
    "stage 3": Case(stage=3, dtype=BF16, state_format="int8"),
    "host, delayed": Case(tier="cpu", schedule=zk.Delayed(after=1)),
    "host, overlapped": Case(stage=2, tier="cpu", schedule="overlap"),
}


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_meanwhile(name: str, gate: Gate, tmp_path: Path) -> None:
    run = CASES[name].begin(tmp_path / "a").train(3)
    saved = run.whole()
    saving = run.save(tmp_path / "x", wait=False)
    run.train(2)
    assert isinstance(saving, Saving) and not saving.done() and saving.exception() is None
    assert "under way" in repr(saving) and saving.path == tmp_path / "x"
    with pytest.raises(TimeoutError, match="still runs"):
        saving.wait(0.01)
    expected = run.train(1).whole()
    gate.open.set()
    saving.wait()
    assert saving.done() and saving.exception() is None and "published" in repr(saving)
    other = CASES[name].begin(tmp_path / "b", seed=1)
    assert other.load(tmp_path / "x")["step"] == 3
    same(other.whole(), saved)
    same(other.train(3).whole(), expected)


def test_state_on_disk_is_written_before_it_returns(gate: Gate, tmp_path: Path) -> None:
    """The next step changes the records; there is no copy of them."""
    case = Case(tier="nvme", dtype=BF16)
    run = case.begin(tmp_path / "a").train(3)
    saved = run.whole()
    saving = run.save(tmp_path / "x", wait=False)
    expected = run.train(2).whole()
    saving.wait()
    other = case.begin(tmp_path / "b", seed=1)
    other.load(tmp_path / "x")
    same(other.whole(), saved)
    same(other.train(2).whole(), expected)


def test_the_next_save_waits_for_this_one(gate: Gate, tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    first = run.save(tmp_path / "x", wait=False)
    threading.Timer(0.3, gate.open.set).start()
    run.train(1)
    second = run.save(tmp_path / "x", wait=False)
    assert first.done()
    second.wait()
    assert run.load(tmp_path / "x")["step"] == 2


def test_loading_waits_for_it_too(gate: Gate, tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x", wait=False)
    threading.Timer(0.2, gate.open.set).start()
    assert run.load(tmp_path / "x")["step"] == 1


def test_an_error_is_raised_by_wait_and_logged(gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    gate.error = IoError("the disk has gone", path="x", errno=5)
    saving = run.save(tmp_path / "x", wait=False)
    with caplog.at_level(logging.ERROR, "zerokern.saving"):
        gate.open.set()
        with pytest.raises(IoError, match="the disk has gone") as raised:
            saving.wait()
    assert str(raised.value) == "the disk has gone"
    assert [record.getMessage() for record in caplog.records if "the disk has gone" in record.getMessage()]
    assert saving.exception() is raised.value and "failed" in repr(saving)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before
    gate.error = None
    run.train(1).save(tmp_path / "x")
    assert run.load(tmp_path / "x")["step"] == 2


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(gate: Gate, tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    gate.error = IoError("the disk has gone", path="x", errno=5)
    gate.open.set()
    run.save(tmp_path / "x", wait=False)
    with pytest.raises(IoError, match="the disk has gone"):
        run.save(tmp_path / "y")
    gate.error = None
    run.save(tmp_path / "y")
    assert run.load(tmp_path / "y")["step"] == 1
    assert not (tmp_path / "x").exists()


def test_a_copy_that_does_not_fit_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000)
    with pytest.raises(BudgetError, match=r"staging_budget=1,000,000\). Nothing was saved"):
        save(tmp_path / "x", model, wait=False, staging_budget=1_000_000)
    assert not (tmp_path / "x").exists()
    saving = save(tmp_path / "x", model, wait=False, staging_budget=5_000_000)
    assert saving is not None
    saving.wait()
    monkeypatch.setattr(background, "room", lambda: {"control group": 3 << 20})
    with pytest.raises(BudgetError, match=r"control group: 3\.0 MiB, less 10%"):
        save(tmp_path / "x", model, wait=False)
    load(tmp_path / "x", model)


def test_the_copy_is_given_back(tmp_path: Path) -> None:
    model = nn.Linear(2000, 2000)
    saving = save(tmp_path / "x", model, wait=False)
    assert saving is not None
    saving.wait()

    def grown() -> float:
        """What is not given back is more each time."""
        before = resident()
        for _ in range(4):
            saving = save(tmp_path / "x", model, wait=False)
            assert saving is not None
            saving.wait()
        return resident() - before

    assert best(grown, 12e6) < 12e6  # a copy has 16 MB


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


CHILD = """
import sys, torch
from zerokern.saving import save
model = torch.nn.Linear(1000, 1000)
torch.nn.init.ones_(model.weight)
save(sys.argv[1], model, wait=False)
"""


def test_python_does_not_exit_before_it_is_published(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "x")], check=True, timeout=240)
    model = nn.Linear(1000, 1000)
    load(tmp_path / "x", model)
    assert (model.weight == 1).all()


def beside_collectives(rank: int, folder: Path) -> bool:
    """Training's collectives and the save's run at the same time, over different connections."""
    case = Case(stage=3, dtype=BF16)
    run = case.begin(folder / "a").train(2)
    saved = run.whole()
    for number in range(4):
        saving = run.save(folder / "x", wait=False)
        if number < 3:
            run.train(2)
            saved = run.whole()
    run.train(3)
    saving.wait()
    expected = run.whole()
    other = case.begin(folder / "b", seed=rank + 1)
    other.load(folder / "x")
    same(other.whole(), saved)
    same(other.train(3).whole(), expected)
    return True


def test_on_two_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, beside_collectives, tmp_path) == [True, True]


def failing_on_one(rank: int, folder: Path) -> str:
    model = zk.shard(nn.Linear(64, 64), stage=2)
    budget = 10 if rank else 1 << 20
    try:
        save(folder / "x", model, wait=False, staging_budget=budget)
    except BudgetError as error:
        return str(error)
    return "saved"


def test_a_budget_of_one_rank_holds_for_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, failing_on_one, tmp_path)
    assert first == second and "staging_budget=10" in first
    assert not (tmp_path / "x").exists()
