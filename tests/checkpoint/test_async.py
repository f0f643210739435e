"""zk.save(wait=False): what was there when it returned is what is saved, whatever training does meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cases import BF16, Case, load, same, save
from forked import run_forked
from torch import nn
from torch.distributed import destroy_process_group
from tries import best
from worlds import on_ranks

import zerokern as zk
from zerokern.checkpoint import background, storage
from zerokern.checkpoint.background import Saving
from zerokern.core.errors import BudgetError, IoError


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
    write = storage.write_data

    def held(draft: Any, plan: Any, planner: Any, report: Any) -> Any:
        gate.reached.set()
        if not getattr(planner, "_streams", True):
            assert gate.open.wait(120)
        if gate.error is not None:
            raise gate.error
        return write(draft, plan, planner, report)

    monkeypatch.setattr(storage, "write_data", held)
    yield gate
    gate.open.set()


CASES = {
    "plain": Case(),
    "stage 3": Case(stage=3, dtype=BF16, state_format="int8"),
    "host, delayed": Case(tier="cpu", schedule=zk.Delayed(after=1)),
    "host, overlapped": Case(stage=2, tier="cpu", schedule="overlap"),
    "disk": Case(tier="nvme", dtype=BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_meanwhile(name: str, gate: Gate, tmp_path: Path) -> None:
    """State on disk is written before it returns: the next step changes the records, of which there is no copy."""
    run = CASES[name].begin(tmp_path / "a").train(3)
    saved = run.whole()
    saving = run.save(tmp_path / "x", wait=False)
    run.train(2)
    assert isinstance(saving, Saving) and saving.exception() is None and saving.path == tmp_path / "x"
    if name != "disk":
        assert not saving.done() and "under way" in repr(saving)
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


def test_the_next_save_and_a_load_wait_for_this_one(gate: Gate, tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    first = run.save(tmp_path / "x", wait=False)
    threading.Timer(0.1, gate.open.set).start()
    second = run.train(1).save(tmp_path / "x", wait=False)
    assert first.done()
    second.wait()
    gate.open.clear()
    run.train(1).save(tmp_path / "x", wait=False)
    threading.Timer(0.1, gate.open.set).start()
    assert run.load(tmp_path / "x")["step"] == 3


def test_an_error_is_raised_by_wait_and_logged(gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    gate.error = IoError("the disk has gone", path="x", errno=5)
    saving = run.save(tmp_path / "x", wait=False)
    with caplog.at_level(logging.ERROR, "zerokern.checkpoint"):
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


def test_a_copy_that_does_not_fit_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000)
    with pytest.raises(BudgetError, match=r"staging_budget=1,000,000\). Nothing was saved"):
        save(tmp_path / "x", model, wait=False, staging_budget=1_000_000)
    assert not (tmp_path / "x").exists()
    saving = save(tmp_path / "x", model, wait=False, staging_budget=5_000_000)
    assert saving is not None
    saving.wait()
    monkeypatch.setattr(background, "memory_left", lambda: {"control group": 3 << 20})
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


AT_THE_END = """
import atexit, sys, torch, zerokern as zk
model = torch.nn.Linear(1000, 1000)
torch.nn.init.ones_(model.weight)
def last():
    saving = zk.save(sys.argv[2], model, wait=False)
    assert saving.done() and saving.exception() is None
    saving.wait()
atexit.register(last)
zk.save(sys.argv[1], model, wait=False)
"""


def test_python_does_not_exit_before_it_is_published(tmp_path: Path) -> None:
    """And what is saved while it exits is so at once."""
    ran = run_forked(AT_THE_END, tmp_path / "x", tmp_path / "last", ends=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    for name in ("x", "last"):
        load(tmp_path / name, model := nn.Linear(1000, 1000))
        assert (model.weight == 1).all()


def test_a_relative_path_is_where_it_was_when_the_save_began(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
    saving = save("saved", nn.Linear(20, 20), wait=False)
    monkeypatch.chdir(tmp_path / "there")
    gate.open.set()
    saving.wait()
    load(tmp_path / "here" / "saved", nn.Linear(20, 20))
    assert not list((tmp_path / "there").iterdir())


def test_an_interrupted_save_is_waited_for_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the copy is taken: nobody has got the Saving."""
    model = nn.Linear(100, 100)
    reached, go_on = threading.Event(), threading.Event()
    real = background.StagedPlanner._copy

    def slow(self: Any, items: Any) -> None:
        reached.set()
        go_on.wait(120)
        real(self, items)

    def interrupt() -> None:
        reached.wait(120)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.1, go_on.set).start()

    monkeypatch.setattr(background.StagedPlanner, "_copy", slow)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "x", model, wait=False)
    save(tmp_path / "x", model)
    load(tmp_path / "x", model)


def test_what_fails_before_the_save_runs_lets_go_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start"):
            save(tmp_path / "x", model, wait=False)
    assert not (tmp_path / "x").exists()
    save(tmp_path / "x", model)


def test_a_failure_of_another_save_does_not_stop_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    save(tmp_path / "x", model)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_data", lambda *_: (_ for _ in ()).throw(IoError("gone", path="y", errno=5)))
        saving = save(tmp_path / "y", model, wait=False)
        assert saving is not None
        saving._thread.join()
    assert load(tmp_path / "x", model) == {}
    with pytest.raises(IoError, match="gone"):  # who saves hears of it, where nobody has asked
        save(tmp_path / "z", model)
    assert not (tmp_path / "y").exists()
    save(tmp_path / "z", model)


def beside_collectives(rank: int, folder: Path) -> None:
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


def ends_with_the_group(rank: int, folder: Path) -> list[bool]:
    """`destroy_process_group` as scripts have it: imported by name, long before. It waits, for a group and the world.

    A save that fails is in the log, and keeps no group: the last thing here, for it ends the world.
    """
    beside_collectives(rank, folder)
    shutdown, write, found = vars(dist.ProcessGroup)["shutdown"], storage.write_data, []
    model = nn.Linear(300, 300)
    nn.init.constant_(model.weight, 7.0)
    for name, broken in (("group", False), ("failing", True), ("world", False)):
        go_on = threading.Event()

        def held(*given: Any, go_on: Any = go_on, broken: bool = broken) -> Any:
            assert go_on.wait(120)
            if broken:
                raise IoError("the disk has gone", path="x", errno=5)
            return write(*given)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(storage, "write_data", held)
            group = None if name == "world" else dist.new_group([0, 1])
            save(folder / name, model, wait=False, group=group)
            assert vars(dist.ProcessGroup)["shutdown"] is not shutdown
            threading.Timer(0.2, go_on.set).start()
            destroy_process_group(group)
            found.append((folder / name / "zerokern.json").exists())
    assert not dist.is_initialized() and vars(dist.ProcessGroup)["shutdown"] is shutdown
    return found


def test_on_two_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, ends_with_the_group, tmp_path) == [[True, False, True]] * 2
    for name in ("group", "world"):
        load(tmp_path / name, model := nn.Linear(300, 300))
        assert (model.weight == 7.0).all()
