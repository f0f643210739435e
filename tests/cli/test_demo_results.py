"""What the demo says in the end: true of a run that went well, and of one that shows the opposite."""

from __future__ import annotations

import argparse
import functools
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zerokern.examples import demo
from zerokern.examples.demo import larger, memory, plot, race, results, together, view
from zerokern.examples.demo.results import Results
from zerokern.examples.model import Shape

TINY = Shape(layers=1, width=64, context=8)
MEMORY = replace(memory.FULL, cap=1_500_000_000)


def outcome(name: str, way: str) -> memory.Outcome:
    ways: dict[str, dict[str, Any]] = {
        "trains": {"losses": [5.0], "peak": 1},
        "runs out": {"out_of_memory": "no room"},
        "fails": {"failure": "exit code 1"},
        "has no room": {"no_room": "no disk"},
    }
    return memory.Outcome(name, **ways[way])


@pytest.mark.parametrize(
    "ways, says",
    [
        (("runs out", "runs out", "trains", "trains"), "In 1,500 MB zerokern trains, torch runs out of memory"),
        (("trains", "trains", "runs out", "runs out"), "In 1,500 MB torch trains, zerokern runs out of memory"),
        (("trains",) * 4, "In 1,500 MB all train; zk.AdamW int8 needs least, 713 MB"),
        (("runs out",) * 4, "In 1,500 MB zerokern and torch run out of memory"),
        (
            ("trains", "runs out", "fails", "trains"),
            "In 1,500 MB zk.AdamW int8 and torch fused train, torch fused + masters runs out of memory, "
            "zk.AdamW exact fails",
        ),
        (
            ("runs out", "runs out", "trains", "has no room"),
            "In 1,500 MB zk.AdamW exact trains, torch runs out of memory, zk.AdamW int8 is left out",
        ),
    ],
)
def test_who_fits_a_cap(ways: tuple[str, ...], says: str) -> None:
    outcomes = [outcome(name, way) for name, way in zip(MEMORY.contenders, ways, strict=True)]
    assert results.capped_finding(MEMORY, outcomes) == says


def lanes(loss: float, seconds: float) -> list[race.Lane]:
    """torch beside masters, which takes 1 s and ends at 2.5, and zerokern's exact lane."""
    made = [race.build(name, TINY, lr=1e-3, seed=0) for name in ("torch-bf16", "exact")]
    for lane, (last, took) in zip(made, ((2.5, 1.0), (loss, seconds)), strict=True):
        lane.losses, lane.optimizer_seconds = [last], [took]
    return made


@pytest.mark.parametrize(
    "loss, says, wrong",
    [
        (2.5003, "Same loss as torch, within 0.0004", False),
        (2.55, "Not the same loss: zk.AdamW exact, bf16 ends 0.05 higher", False),
        (2.25, "Not the same loss: zk.AdamW exact, bf16 ends 0.25 lower", True),
        (float("nan"), "zk.AdamW exact, bf16 has no finite loss", True),
    ],
)
def test_losses_side_by_side(loss: float, says: str, wrong: bool) -> None:
    assert results.loss_finding(lanes(loss, 1.0)) == says
    assert bool(Results(lanes=lanes(loss, 1.0)).failures) is wrong


@pytest.mark.parametrize(
    "seconds, says",
    [
        (1 / 2.1, "Norm, clipping and update take 2.1x less time than torch's (zk.AdamW exact, bf16)"),
        (1.0, "Norm, clipping and update: this machine shows no gain with a model of this size"),
        (1.5, "Norm, clipping and update: this machine shows no gain with a model of this size"),
    ],
)
def test_only_a_gain_of_time_is_a_figure(seconds: float, says: str) -> None:
    assert results.time_finding(lanes(2.5, seconds)) == says
    panels = [finding for finding, _, _ in plot.panels(Results(lanes=lanes(2.5, seconds)))]
    assert (says in panels) is (seconds < 1)


PLAN = functools.cache(together.plan)  # a model of its size is made for it


def ranks(held: int, loss: float) -> together.Outcome:
    plain = together.Told([5.0, 4.0], [1.0, 1.0], {"parameters": 100})
    made = [together.Told([5.0, loss], [1.0, 1.0], {"parameters": held}, gathered=10) for _ in range(2)]
    return together.Outcome(together.FULL, PLAN(together.FULL), plain, made)


@pytest.mark.parametrize(
    "held, loss, says",
    [
        (50, 4.0, "Each of 2 processes holds 40 % less than one process, same loss"),
        (90, 4.0, "Each of 2 processes holds no less than one process, same loss"),
        (120, 4.1, "Each of 2 processes holds 30 % more than one process, other losses"),
    ],
)
def test_what_ranks_hold(held: int, loss: float, says: str) -> None:
    assert results.ranks_finding(ranks(held, loss)) == says


def rested(*losses: float) -> larger.Outcome:
    both = [larger.Told([5.0, 4.0], [1.0, 1.0], peak=3), larger.Told([*losses], [1.0, 1.0], peak=2)]
    return larger.Outcome(replace(larger.FULL, cap=500_000_000), *both)


def test_what_trained_from_disk() -> None:
    assert results.rested_finding(rested(5.0, 4.0)) == "A training of 2.8x its memory cap runs from disk, same bits"
    assert results.rested_finding(rested(5.0, 4.5)).endswith("from disk, other losses from step 2 on")


def test_every_panel_is_titled_with_its_finding(tmp_path: Path) -> None:
    """In a run that shows the opposite of what is hoped for."""
    outcomes = [outcome(name, "runs out") for name in MEMORY.contenders]
    found = Results([(MEMORY, outcomes)], lanes(2.75, 0.5), ranks(120, 4.1), rested(5.0, 4.5))
    *measured, (words, _, _) = plot.panels(found)
    assert [finding for finding, _, _ in measured] == [text for _, text in found.findings]
    assert words == f"{len(found.failures)} failed"
    assert plot.draw(tmp_path / "opposite.png", found)
    assert found.failures == [
        "zk.AdamW exact, bf16 ends with loss 2.7500, torch with 2.5000",
        "the losses differ by 1e-01",
        "the losses of step 2 differ",
    ]
    assert not plot.draw(tmp_path / "none.png", Results()) and not (tmp_path / "none.png").exists()


def test_what_torch_or_the_machine_lacks_is_no_failure() -> None:
    outcomes = [outcome("torch", "fails"), outcome("exact", "trains")]
    alone = together.Outcome(together.FULL, PLAN(together.FULL), together.Told(), [], peer_failure="exit code 1")
    found = Results([(MEMORY, outcomes)], ranks=alone, left_out={"4": "no folder has room"})
    assert found.failures == []
    assert found.findings[1:] == [
        ("Processes", "torch alone failed: exit code 1"),
        ("Disk", "Left out here: no folder has room"),
    ]


def ended(
    monkeypatch: pytest.MonkeyPatch, picture: Path, fail: BaseException | None = None, width: int = 60
) -> tuple[int, list[str]]:
    """The exit code and the lines of a demo whose second act is played, and whose third breaks off."""
    stream = io.StringIO()
    monkeypatch.setattr(view, "terminal", lambda **_: Console(file=stream, width=width))

    def acts(_: argparse.Namespace, found: Results, *__: object) -> None:
        found.lanes = lanes(2.5, 0.5)
        if fail is not None:
            raise fail

    monkeypatch.setattr(demo, "perform", acts)
    code = 0
    try:
        code = demo.run(argparse.Namespace(out=picture, full=False))
    except KeyboardInterrupt:
        code = 130
    return code, stream.getvalue().splitlines()


def test_without_matplotlib_it_runs_and_draws_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "zerokern.examples.demo.plot", raising=False)
    monkeypatch.delattr(demo, "plot", raising=False)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    code, said = ended(monkeypatch, parser.parse_args(["--out", str(tmp_path / "demo.png")]).out, width=120)
    says = "Picture:   none was drawn: matplotlib is not installed; pip install 'zerokern[cli]' brings it"
    assert (code, said.count(says)) == (0, 1) and not (tmp_path / "demo.png").exists()
    assert "Time:      Norm, clipping and update take 2.0x less time than torch's (zk.AdamW exact, bf16)" in said


@pytest.mark.parametrize("stopped", [False, True])
def test_lines_close_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool) -> None:
    """Also a demo that Ctrl-C ends."""
    code, said = ended(monkeypatch, tmp_path / "demo.png", KeyboardInterrupt() if stopped else None)
    assert code == (130 if stopped else 0)
    assert said[:3] == [
        "",
        "Loss:      Same loss as torch, within 0.0001",
        "Time:      Norm, clipping and update take 2.0x less time than torch's (zk.AdamW exact, bf16)",
    ]
    assert ("Ended:     Stopped before the end" in said) is stopped
    assert f"Picture:   {tmp_path / 'demo.png'}" in said and (tmp_path / "demo.png").exists()
    assert said[-1].startswith("Next:      ")
