"""Ctrl-C and SIGTERM at `zerokern bench`: whole contests and rounds are kept, and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import each

from zerokern.cli.main import main

timers = import_module("zerokern.bench.timers")
bench_run = import_module("zerokern.bench.run")
bench_measure = import_module("zerokern.bench.measure")
disk_contest = import_module("zerokern.bench.disk.contest")
pytestmark = pytest.mark.usefixtures("no_waiting")
BENCH = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it is, if it does not end
from zerokern.cli.main import main
sys.exit(main(['bench', *sys.argv[1:]]))
"""


def ends_in(call: int) -> timers.Contestant:
    """Somebody presses Ctrl-C in that call of one that takes turns."""
    calls = iter(range(1, 1000))

    def run() -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    return timers.Contestant("one", run)


def test_whole_rounds_are_kept() -> None:
    other = timers.Contestant("other", int)
    times = timers.interleave(
        [ends_in(2 + 3), other], 60, at_least_s=0.0
    )  # the first two calls look how long one takes
    assert [len(found) for found in times.values()] == [2, 2]
    assert times.interrupted == "after 2 of 60 rounds"


@each("call", [1, 2, 3])
def test_without_a_whole_round_it_is_an_interrupt(call: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        timers.interleave([ends_in(call)], 60, at_least_s=0.0)


@each("rounds", [1, 3])
def test_behind_the_last_round_it_is_an_interrupt_too(rounds: int) -> None:
    def after_round(done: int) -> None:
        if done == rounds:
            raise KeyboardInterrupt

    one = timers.Contestant("one", int)
    found = timers.interleave([one], rounds, at_least_s=0.0, after_round=after_round)
    assert found.interrupted == f"after {rounds} of {rounds} rounds"
    mover = disk_contest.Mover("one", "", int, lambda: None)
    assert disk_contest.rounds([mover], rounds, after_round).interrupted == found.interrupted
    assert not timers.interleave([one], rounds, at_least_s=0.0).interrupted


def ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def contests(*checks: Any) -> list[Any]:
    """One for each check, which is the first that is done in it."""
    contest = import_module("zerokern.bench.contest")
    names = "first", "second", "third"
    providers = [contest.Provider("x", int, check, 8.0, lambda threads: None) for check in checks]
    return [contest.Contest(name, 1, [one], {}) for name, one in zip(names, providers, strict=False)]


@each("over", [1, 2])
def test_contests_that_were_over_are_written(
    over: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cast = import_module("zerokern.bench.ops.cast")
    made = contests(*[int] * over, *[ctrl_c] * (3 - over))
    monkeypatch.setattr(cast, "contests", lambda request: made)
    result = tmp_path / "result.json"
    assert main(["bench", "cast", "--smoke", "--numel", "4K", "--json", str(result)]) == 130
    content, when = json.loads(result.read_text()), f"after {over} of 3 contests"
    assert content["interrupted"] == when and len(content["contests"]) == over
    assert f"zerokern bench: interrupted {when}" in capsys.readouterr().err


def test_in_the_first_contest_it_is_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = contests(ctrl_c, int)
    monkeypatch.setattr(import_module("zerokern.bench.ops.cast"), "contests", lambda request: made)
    result = tmp_path / "result.json"
    assert main(["bench", "cast", "--smoke", "--numel", "4K", "--json", str(result)]) == 130
    assert not result.exists()


def test_while_cycles_are_counted_all_contests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = contests(int, int)
    monkeypatch.setattr(import_module("zerokern.bench.ops.adam"), "contests", lambda request: made)
    monkeypatch.setattr(bench_measure, "cycles_per_16", ctrl_c)
    request = import_module("zerokern.bench.contest").Request("adam", None, ())
    found = bench_measure.measure(request, 1, bench_run.SMOKE, lambda text: None, lambda *_: None)
    assert len(found.outcomes) == 2 and found.interrupted == "after 2 of 2 contests"


def test_contests_of_disks_that_were_over_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, save, stall = (import_module(f"zerokern.bench.{name}") for name in ("ops.io", "disk.save", "disk.stall"))
    outcome = disk_contest.Outcome("one", [], {}, "", 0.0)
    monkeypatch.setattr(io.zk.io, "probe", lambda folder: SimpleNamespace(line=str))
    monkeypatch.setattr(io, "_contest", lambda *_: outcome)
    monkeypatch.setattr(io.tickets, "outcome", ctrl_c)
    found, when = io.measure(io.DiskRequest(tmp_path, (), smoke=True), lambda text: None, lambda *_: None)
    assert found and when == f"after {len(found)} of {len(found) + 1} contests"

    monkeypatch.setattr(save, "run", lambda *_: outcome)
    monkeypatch.setattr(stall, "measure", ctrl_c)
    shape = import_module("zerokern.bench.shapes").shape("flat", 5000)
    asked = save.SaveRequest(tmp_path, shape, (), 1, False)
    found, when = save.measure(asked, lambda text: None, lambda *_: None)
    assert found == [outcome] * 2 and when == "after 2 of 3 contests"


class Running:
    """A benchmark in a session of its own, as a terminal starts it."""

    def __init__(self, tmp_path: Path, *words: str) -> None:
        self.json = tmp_path / "result.json"
        self._said = (tmp_path / "said").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", BENCH, *words, "--json", str(self.json)],
            stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT, start_new_session=True, cwd=tmp_path,
        )  # fmt: skip

    def said(self) -> str:
        return Path(self._said.name).read_text()

    def until(self, *words: str) -> None:
        deadline = time.monotonic() + 120
        while not all(word in self.said() for word in words):
            assert self._process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def ended_by(self, number: int, everyone: bool) -> int:
        (os.killpg if everyone else os.kill)(self._process.pid, number)
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(1.0)
            pytest.fail(f"it does not end:\n{self.left()}\n{self.said()}")
        assert "Traceback" not in self.said()
        deadline = time.monotonic() + 10  # what Python itself starts beside a process ends a moment after it
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.left()
        return status

    def left(self) -> list[str]:
        """The commands of its session that still run."""
        found = subprocess.run(["ps", "-o", "args=", "-s", str(self._process.pid)], capture_output=True, text=True)
        return found.stdout.splitlines()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def test_what_was_measured_is_printed_and_written(tmp_path: Path) -> None:
    with Running(tmp_path, "stream", "--numel", "64K", "--vs", "", "--pairs", "100000") as running:
        running.until("/100000 rounds")
        time.sleep(0.3)  # a round is over then
        assert running.ended_by(signal.SIGINT, everyone=False) == 130
        content = json.loads(running.json.read_text())
        assert content["interrupted"].startswith("after ") and content["interrupted"].endswith(" of 100000 rounds")
        assert f"zerokern bench: interrupted {content['interrupted']}" in running.said()
        assert content["rows"] and content["rows"][0]["name"] in running.said()


@pytest.mark.slow
def test_sigterm_ends_the_ranks(tmp_path: Path) -> None:
    with Running(tmp_path, "zero", "--smoke", "--vs", "ddp") as running:
        running.until("GPT tiny")
        time.sleep(1.0)
        assert running.ended_by(signal.SIGTERM, everyone=False) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_contests_of_ranks_that_were_over_are_kept(tmp_path: Path) -> None:
    with Running(tmp_path, "zero", "--smoke", "--vs", "ddp", "--dtype", "fp32,bf16") as running:
        running.until("GPT tiny, fp32", "tokens/s", "GPT tiny, bf16")
        assert running.ended_by(signal.SIGINT, everyone=True) == 130
        content = json.loads(running.json.read_text())
        assert content["interrupted"] == "after 1 of 2 contests" and len(content["contests"]) == 1
