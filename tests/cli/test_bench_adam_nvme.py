"""`zerokern bench adam --tier nvme`: the step beside its two halves, on the same records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from zerokern.cli.main import main

adam, contest, shapes = (import_module(f"zerokern.bench.{name}") for name in ("disk.adam", "disk.contest", "shapes"))
NUMEL = 300_000
EXACT, INT8 = (layout.name for layout in adam.FORMATS)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The disk is probed once for this file, and not into anybody's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[object]]:
    with adam.steps(tmp_path, shapes.shape("flat", NUMEL)) as found:
        yield found


def test_steps_on_disk_and_in_memory_are_the_same_bits(made) -> None:
    for one in made:
        one.check()
        one.check()


def test_a_step_that_differs_gets_no_time(made) -> None:
    made[0].check()
    made[0].memory_params[0][7] += 1.0
    with pytest.raises(
        import_module("zerokern.bench.contest").WrongResult, match=r"parameter 0\[\d+\] is .* with state on disk"
    ):
        made[0].check()


def test_transfers_alone_change_nothing(made) -> None:
    one = made[1]
    one.check()
    before = one.on_disk.state_dict()["state"][0]
    one.move()
    after = one.on_disk.state_dict()["state"][0]
    assert all(torch.equal(before[key], after[key]) for key in ("exp_avg.codes", "exp_avg_sq.codes"))
    one.check()


def test_bytes_per_step_are_those_of_the_design(made) -> None:
    """10+10 bytes a parameter for exact, 3.1+3.1 for int8; a record is a whole number of pages."""
    for one, wanted in zip(made, (20, 6.125), strict=True):
        one.check()
        assert 0 <= one.nbytes - wanted * NUMEL < 64 * 4096


def test_nothing_is_left(tmp_path: Path) -> None:
    with adam.steps(tmp_path, shapes.shape("small", 5000)) as found:
        found[0].check()
    assert list(tmp_path.iterdir()) == []


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, result, chart = tmp_path / "disk", tmp_path / "result.json", tmp_path / "chart.png"
    place.mkdir()
    arguments = ["--path", str(place), "--smoke", "--json", str(result), "--plot", str(chart)]
    assert main(["bench", "adam", "--tier", "nvme", *arguments]) == 0
    content = json.loads(result.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == [f"{name}{half}" for name in (EXACT, INT8) for half in ("", ": I/O alone", ": compute alone")]
    assert rows[EXACT]["ratio"].keys() == {"I/O alone", "compute alone", "the longer of both"}
    assert rows[INT8]["ratio"].keys() == {"I/O alone", "compute alone", "the longer of both", EXACT}
    for row in content["rows"]:
        assert row["parameters_per_s"] == pytest.approx(content["shape"]["numel"] * 1e9 / row["ns"], rel=1e-3)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "parameters/s" in capsys.readouterr().out
    assert list(place.iterdir()) == []


def test_the_longer_half_is_taken_round_by_round(made) -> None:
    def passes(*seconds: float) -> list[object]:
        return [contest.Pass(s * 1e9, one.nbytes, 0.1, one.nbytes) for s in seconds]

    for one in made:
        one.check()
    movers = [mover for one in made for mover in one.movers()]
    taken = {mover.name: passes(1.0, 1.0, 1.0) for mover in movers}
    taken[f"{EXACT}: I/O alone"], taken[f"{EXACT}: compute alone"] = passes(0.9, 0.1, 0.9), passes(0.1, 0.9, 0.1)
    taken[INT8] = passes(0.25, 0.25, 0.25)
    outcome = adam.summary("step", made, movers, taken)
    found = {row.name: row for row in outcome.rows}
    assert found[EXACT].ratio["the longer of both"].median == pytest.approx(0.9)
    assert found[INT8].ratio[EXACT].median == pytest.approx(4.0)
    assert found[f"{EXACT}: compute alone"].roof_share is None
