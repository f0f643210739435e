"""The whole demo: small in this process, and as a command on a machine with less than it hopes for."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from rich.console import Console

from zerokern.examples import demo
from zerokern.examples.demo import larger, memory, processes, sizes, together, view
from zerokern.examples.demo.act import Act
from zerokern.examples.demo.results import Results
from zerokern.examples.model import Shape

SHAPE = Shape(4, 384, 32)  # wide rather than deep: a layer costs Python
ACT = Act(SHAPE, (), rows=1, steps=3, least=2, lr=1e-3, ring_nbytes=1 << 20, world=2, stage=3)
RANKS = replace(ACT, shape=Shape(4, 384, 32), rows=2)
LOSS_ERROR = 1e-5  # sums of another order, three steps of them
PAGES_ERROR = 0.05  # of a rank's memory: what libraries and the interpreter take besides

SMALL = """
import sys
from zerokern.cli.main import main
from zerokern.examples.demo import sizes
sizes.WIDTHS, sizes.RACE_S = (int(sys.argv[2]),), 2.0
sys.exit(main(["demo", "--out", sys.argv[1]]))
"""


def quiet() -> view.View:
    return view.View(Console(quiet=True))


def performed(monkeypatch: pytest.MonkeyPatch, out: Path, act: str = "all") -> tuple[int, Results]:
    """The exit code and the results of a demo whose acts are small."""
    kept: list[Results] = []
    small = sizes.Acts(
        (replace(ACT, contenders=("torch", "int8-split8")),),
        replace(ACT, shape=Shape(1, 64, 32), contenders=("torch", "exact-fp32")),
        replace(RANKS, shape=Shape(2, 128, 32)),
        replace(ACT, steps=2),
    )
    monkeypatch.setattr(sizes, "fitting", lambda _: small)
    close = demo.close
    monkeypatch.setattr(demo, "close", lambda *words: (kept.append(words[2]), close(*words)))
    return demo.run(argparse.Namespace(act=act, full=False, out=out)), kept[0]


def test_a_small_demo_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = performed(monkeypatch, tmp_path / "demo.png")
    assert (code, found.failures) == (0, [])
    assert {name for name, _ in found.findings} == {"Memory", "Loss", "Time", "Processes", "Disk"}
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    ((act, (theirs, ours)),) = found.capped
    assert theirs.out_of_memory and ours.trained
    assert ours.peak - ours.resident < act.cap < 16 * SHAPE.numel
    if "4" not in found.left_out:
        assert found.rested.resting.losses == found.rested.resident.losses


def test_an_error_of_zerokern_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a wrong sum")

    monkeypatch.setattr(together, "perform", broken)
    code, found = performed(monkeypatch, tmp_path / "demo.png", "3")
    assert (code, found.failures) == (1, ["AssertionError: a wrong sum"])


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ZEROKERN_CPU_ISA": "avx2"}


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def little_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (900 << 20, 900 << 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, environment, limit",
    [(256, AVX2, one_core), (768, {}, little_memory)],
    ids=["one core of avx2", "little memory"],
)
def test_a_lesser_machine_is_no_failure(
    width: int, environment: dict[str, str], limit: Callable[[], None], tmp_path: Path
) -> None:
    picture = tmp_path / "demo.png"
    command = [sys.executable, "-c", SMALL, str(picture), str(width)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=os.environ | environment, preexec_fn=limit,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = [line.split(":")[0] for line in ran.stdout.splitlines()[-7:]]
    assert names == ["Memory", "Loss", "Time", "Processes", "Disk", "Picture", "Next"] or "Left out" in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "nan" not in ran.stdout
    # so small a model leaves little room for a cap: the others may leave an act out, and say so
    assert limit is not little_memory or "left out" in ran.stdout, ran.stdout


@pytest.mark.slow
def test_disk_trains_where_memory_does_not_suffice() -> None:
    names = ("int8-split8", f"exact{memory.DISK}")
    act, (capped, ours) = memory.perform(replace(ACT, shape=Shape(8, 512, 32), contenders=names, warmup=8), quiet())
    assert capped.verdict == "OUT OF MEMORY (step 1, optimizer)"
    assert ours.trained and ours.peak - ours.resident < act.cap
    assert ours.held.keys() == {"parameters", "gradients"}
    assert sum(ours.stored.values()) == pytest.approx(10 * act.shape.numel, rel=1e-3)


@pytest.mark.slow
def test_what_was_planned_is_held() -> None:
    outcome = together.perform(RANKS, quiet())
    assert not outcome.failed and outcome.gap < LOSS_ERROR
    planned = dict(outcome.plan.roles)
    gathered = planned.pop("gathered")
    for one in outcome.ranks:
        assert one.losses == outcome.ranks[0].losses and len(one.losses) == RANKS.steps
        assert one.roles == pytest.approx(planned, rel=1e-3)
        assert one.gathered == pytest.approx(gathered, rel=1e-3)
        assert one.pages == pytest.approx(outcome.planned, rel=PAGES_ERROR)
    assert outcome.plain.held == 16 * RANKS.shape.numel


@pytest.mark.slow
def test_what_rests_on_disk_is_written_there() -> None:
    act = replace(ACT, shape=Shape(8, 384, 32))
    outcome = larger.perform(act, quiet())
    assert not outcome.failed and outcome.resting.losses == outcome.resident.losses
    assert outcome.resting.taken < outcome.act.cap
    layer = 2 * 12 * act.shape.width**2  # its parameters may still be on their way when a step is counted
    written = list(accumulate(outcome.resting.written))
    assert all(nbytes > 0.99 * step * larger.at_rest(act) - layer for step, nbytes in enumerate(written, 1)), written
    assert outcome.resident.of_settled("written") == 0


LONG = replace(ACT, shape=Shape(1, 128, 32), rows=2, steps=10**6, least=10**6)


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mortal(together.Processes):
        def events(self) -> Iterator[tuple[int, dict]]:
            for rank, event in super().events():
                if event["event"] == "step" and rank == 1:
                    self.running[1].terminate()
                yield rank, event

    monkeypatch.setattr(together, "Processes", Mortal)
    _, failure = together.train_on_ranks(LONG, LONG.steps, quiet())
    assert failure.startswith("process 1: killed by SIGTERM; process 0: exit code 1: ")
    assert "rank 1 is gone" in failure


def test_a_deadline_ends_the_processes() -> None:
    with pytest.raises(together.NotHereError, match="longer here than the demo has time for"):
        together.train_on_ranks(LONG, LONG.steps, quiet(), time.monotonic() + 1.0)


TRAINS_LONG = """
import sys
from dataclasses import replace
from itertools import accumulate
from zerokern.cli import main
from zerokern.examples.demo import sizes
small = sizes.small(256)
long = replace(small.together, steps=10**6, least=10**6)
sizes.fitting = lambda _: replace(small, together=long)
sys.exit(main.main(["demo", "--act", "3"]))
"""


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_behind(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C ends the processes, and they end by themselves when nobody hears them any more."""
    command = [sys.executable, "-c", TRAINS_LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True) as running:
        try:
            next(line for line in running.stdout if "loss" in line)
            below = descendants(running.pid)
            assert below and all(map(alive, below))
        finally:
            os.kill(running.pid, number)
        assert running.wait(120) == code
    patience = time.monotonic() + 60
    while any(map(alive, below)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not [one for one in below if alive(one)]


def test_a_child_that_falls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Act, "to_json", lambda act: "{}")
    outcome = memory.train_capped(ACT, "int8-split8", quiet())
    assert outcome.verdict == "FAILED (starting)" and outcome.failed
    assert outcome.failure == "exit code 1: KeyError: 'shape'"
    assert not memory.train_capped(ACT, "torch", quiet()).failed  # it is not ours
    assert processes.ending(-6, "") == "killed by SIGABRT"
