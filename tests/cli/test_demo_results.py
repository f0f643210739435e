"""What the demo says in the end: true of a run that went well, and of one that shows the opposite."""

from __future__ import annotations

import argparse
import doctest
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zerokern.examples import demo
from zerokern.examples.demo import act, larger, memory, plot, race, results, together, view
from zerokern.examples.demo.results import Results
from zerokern.examples.model import Shape

TINY = Shape(layers=1, width=64, context=8)
MEMORY = memory.FULL


def outcome(name: str, way: str) -> memory.Outcome:
    ways: dict[str, dict[str, Any]] = {
        "trains": {"losses": [5.0], "peak": 1},
        "runs out": {"out_of_memory": "no room"},
        "fails": {"failure": "exit code 1"},
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
    "loss, seconds, says",
    [
        (2.5003, 1 / 2.1, "Same loss as torch, within 0.0004, 2.1x less time in the optimizer"),
        (2.5, 1.0, "Same loss as torch, within 0.0001, the same time in the optimizer"),
        (2.75, 1.5, "Not the same loss: zk.AdamW exact, bf16 ends 0.25 higher, 1.5x more time in the optimizer"),
        (2.25, 0.5, "Not the same loss: zk.AdamW exact, bf16 ends 0.25 lower, 2.0x less time in the optimizer"),
        (float("nan"), 0.5, "zk.AdamW exact, bf16 has no finite loss, 2.0x less time in the optimizer"),
    ],
)
def test_losses_and_times_side_by_side(loss: float, seconds: float, says: str) -> None:
    assert results.race_finding(lanes(loss, seconds)) == says


def ranks(held: int, loss: float) -> together.Outcome:
    plain = together.Told([5.0, 4.0], [1.0, 1.0], {"parameters": 100})
    made = [together.Told([5.0, loss], [1.0, 1.0], {"parameters": held}, gathered=10) for _ in range(2)]
    return together.Outcome(together.QUICK, together.plan(together.QUICK), plain, made)


@pytest.mark.parametrize(
    "held, loss, says",
    [
        (50, 4.0, "Each of 2 processes holds 40 % less, same loss"),
        (90, 4.0, "Each of 2 processes holds as much as one, same loss"),
        (120, 4.1, "Each of 2 processes holds 30 % more, other losses"),
    ],
)
def test_what_ranks_hold(held: int, loss: float, says: str) -> None:
    assert results.ranks_finding(ranks(held, loss)) == says


def rested(*losses: float) -> larger.Outcome:
    both = [larger.Told([5.0, 4.0], [1.0, 1.0], peak=3), larger.Told([*losses], [1.0, 1.0], peak=2)]
    return larger.Outcome(larger.FULL, *both)


def test_what_trained_from_disk() -> None:
    assert results.rested_finding(rested(5.0, 4.0)) == "A training of 2.8x its memory cap runs from disk, same bits"
    assert results.rested_finding(rested(5.0, 4.5)).endswith("from disk, other losses from step 2 on")


def test_every_panel_is_titled_with_its_finding(tmp_path: Path) -> None:
    """In a run that shows the opposite of what is hoped for."""
    outcomes = [outcome(name, "runs out") for name in MEMORY.contenders]
    found = Results([(MEMORY, outcomes)], lanes(2.75, 2.0), ranks(120, 4.1), rested(5.0, 4.5))
    titles = [finding for finding, _, _ in plot.panels(found)]
    assert [*titles[:1], f"{titles[1]}, {titles[2]}", *titles[3:]] == found.findings
    assert plot.draw(tmp_path / "opposite.png", found)
    assert found.failures == [
        "nothing of zerokern's fitted the cap",
        "the losses differ by 1e-01",
        "the losses of step 2 differ",
    ]


def ended(monkeypatch: pytest.MonkeyPatch, picture: Path, fail: BaseException | None = None) -> tuple[int, list[str]]:
    """The exit code and the lines of a demo whose second act is played, and whose third breaks off."""
    stream = io.StringIO()
    monkeypatch.setattr(view, "Console", lambda **_: Console(file=stream, width=60))

    def acts(_: argparse.Namespace, found: Results, *__: object) -> Iterator[str]:
        found.lanes = lanes(2.5, 0.5)
        yield "2"
        if fail is not None:
            raise fail

    monkeypatch.setattr(demo, "perform", acts)
    code = 0
    try:
        code = demo.run(argparse.Namespace(out=picture))
    except KeyboardInterrupt:
        code = 130
    return code, stream.getvalue().splitlines()


def test_three_lines_close_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, (*_, blank, found, picture, following) = ended(monkeypatch, tmp_path / "demo.png")
    assert (code, blank) == (0, "")
    assert found == "Found:   Same loss as torch, within 0.0001, 2.0x less time in the optimizer."
    assert picture == f"Picture: {tmp_path / 'demo.png'}"
    assert following.startswith("Next:    ") and "zerokern bench adam --vs torch" in following


def test_what_was_done_before_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, (*_, found, picture, _) = ended(monkeypatch, tmp_path / "demo.png", KeyboardInterrupt())
    assert code == 130
    assert found.endswith("2.0x less time in the optimizer. Stopped before the end.")
    assert picture == f"Picture: {tmp_path / 'demo.png'}" and (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("width", [20, 60, 200])
def test_tables_keep_to_a_terminal(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    header, row = ["", "first", "second", "third"], ["a role", "1,000 MB", "22 MB", "a long verdict"]
    view.View(console).table(header, [row])
    said = stream.getvalue()
    assert max(map(len, said.splitlines())) <= max(width, len("a role  a long verdict"))
    assert all(cell in said for cell in (*header, *row))


@pytest.mark.parametrize("module", [act, demo, memory, plot, race, results, view])
def test_examples(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
