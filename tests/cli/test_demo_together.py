"""The demo's third act: ranks beside plain torch, what was planned beside what is held, and no process left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from zerokern.examples.demo import plot, together
from zerokern.examples.demo.act import Act
from zerokern.examples.demo.results import Results
from zerokern.examples.demo.view import View
from zerokern.examples.model import Shape

ACT = Act(Shape(4, 384, 32), (), world=2, stage=3, rows=2, steps=3, lr=2e-4, seconds=600.0)
TINY = Act(Shape(1, 128, 32), (), world=2, stage=3, rows=2, steps=500, lr=1e-3, seconds=600.0)
LOSS_ERROR = 1e-5  # sums of another order, three steps of them
PAGES_ERROR = 0.05  # of a rank's memory: what libraries and the interpreter take besides


@pytest.fixture(scope="module")
def performed() -> tuple[together.Outcome, str]:
    stream = io.StringIO()
    outcome = together.perform(ACT, View(Console(file=stream, width=100)))
    return outcome, stream.getvalue()


@pytest.mark.slow
def test_ranks_follow_torch(performed: tuple[together.Outcome, str]) -> None:
    outcome, said = performed
    assert not outcome.failed, said
    assert len(outcome.plain.losses) == len(outcome.ranks[0].losses) == ACT.steps
    assert outcome.ranks[0].losses == outcome.ranks[1].losses
    assert outcome.gap < LOSS_ERROR
    assert outcome.plain.losses[-1] < outcome.plain.losses[0] - 0.1


@pytest.mark.slow
def test_what_was_planned_is_held(performed: tuple[together.Outcome, str]) -> None:
    outcome, _ = performed
    planned = dict(outcome.plan.roles)
    gathered = planned.pop("gathered")
    for one in outcome.ranks:
        assert one.roles == pytest.approx(planned, rel=1e-3)
        assert one.gathered == pytest.approx(gathered, rel=1e-3)
        assert one.pages == pytest.approx(outcome.planned, rel=PAGES_ERROR)
        assert one.peak > one.held * (1 - PAGES_ERROR)  # warming up may have left pages that are used again
    assert outcome.plain.held == 16 * ACT.shape.numel
    assert outcome.plain.pages == pytest.approx(outcome.plain.held, rel=PAGES_ERROR)


@pytest.mark.slow
def test_the_tables_say_it(performed: tuple[together.Outcome, str]) -> None:
    outcome, said = performed
    for words in ("Act 3", "planned for a rank", "exp_avg_sq", "units gathered, at most", "no claim for GPUs"):
        assert words in said
    assert f"{outcome.plain.losses[0]:.6f}" in said and f"{outcome.ranks[0].losses[-1]:.6f}" in said


@pytest.mark.slow
def test_the_picture_has_a_panel_for_it(performed: tuple[together.Outcome, str], tmp_path: Path) -> None:
    assert plot.draw(tmp_path / "ranks.png", Results(ranks=performed[0]))
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    outcome = together.Outcome(ACT, performed[0].plan, together.Told(), [], failure="no rank came")
    assert not plot.draw(tmp_path / "none.png", Results(ranks=outcome))
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "losses, failed", [([5.0, 4.0], False), ([5.0, 4.1], True), ([5.0, float("nan")], True), ([], True)]
)
def test_other_losses_are_a_failure(losses: list[float], failed: bool) -> None:
    ranks = [together.Told(losses=losses) for _ in range(2)]
    assert together.Outcome(ACT, together.plan(ACT), together.Told(losses=[5.0, 4.0]), ranks).failed is failed


@pytest.mark.slow
def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mortal(together.Processes):
        def events(self) -> Iterator[tuple[int, dict]]:
            for rank, event in super().events():
                if event["event"] == "step" and rank == 1:
                    self.running[1].kill()
                yield rank, event

    monkeypatch.setattr(together, "Processes", Mortal)
    _, failure = together.train_on_ranks(TINY, 2000, View(Console(file=io.StringIO())))
    assert failure.startswith("process 1: killed by SIGKILL; process 0: exit code 1: ")
    assert "rank 1 is gone" in failure


def test_ranks_that_cannot_start_are_reported() -> None:
    act = replace(TINY, shape=Shape(1, 100, 32))
    _, failure = together.train(act, 2, 0, "torch", View(Console(file=io.StringIO())))
    assert failure.startswith("process 0: exit code 1: ")


TRAINS_LONG = """
import sys
from zerokern.cli import main
from zerokern.examples.demo import together
from zerokern.examples.demo.act import Act
from zerokern.examples.demo.results import Results
from zerokern.examples.model import Shape
act = Act(Shape(1, 128, 32), (), world=2, stage=3, rows=2, steps=10**6, lr=1e-3, seconds=600.0)
together.perform = lambda _, view: together.train_on_ranks(act, act.steps, view)
sys.exit(main.main(["demo", "--act", "3", "--quick"]))
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_nothing_is_left_behind(number: signal.Signals, code: int) -> None:
    """Ctrl-C ends the ranks, and they end by themselves when nobody hears them any more."""
    command = [sys.executable, "-c", TRAINS_LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        try:
            assert demo.stdout is not None
            heard = next(line for line in demo.stdout if "loss" in line)
            ranks = [int(one) for one in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()]
            assert "zk.shard on 2 processes" in heard and len(ranks) == 2 and all(map(alive, ranks))
        finally:
            os.kill(demo.pid, number)
        assert demo.wait(120) == code
        patience = time.monotonic() + (0 if number == signal.SIGINT else 120)
        while any(map(alive, ranks)) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not [one for one in ranks if alive(one)]
