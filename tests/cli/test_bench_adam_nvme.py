"""`zerokern bench adam --tier nvme`, the step beside its halves on the same records, and `bench save`, whole states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from zerokern.cli.main import main

adam, contest, save, shapes, stall, wrong = (
    import_module(f"zerokern.bench.{name}")
    for name in ("disk.adam", "disk.contest", "disk.save", "shapes", "disk.stall", "contest")
)
NUMEL = 300_000
EXACT, INT8 = (layout.name for layout in adam.FORMATS)
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[object]]:
    with adam.steps(tmp_path, shapes.shape("flat", NUMEL)) as found:
        yield found


def test_a_step_that_differs_gets_no_time(made) -> None:
    made[0].check()
    made[0].memory_params[0][7] += 1.0
    with pytest.raises(wrong.WrongResult, match=r"parameter 0\[\d+\] is .* with state on disk"):
        made[0].check()


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


# `bench save`: against torch's ways and the disk, each checked before it is timed.


@pytest.fixture
def training():
    return save.Training(shapes.shape("flat", 5000))


def test_what_loads_other_values_gets_no_time(training) -> None:
    tensors = training.tensors()
    with pytest.raises(wrong.WrongResult, match=r"somebody: model.0 and \d others"), training.compared("somebody"):
        pass
    with training.compared("somebody"):
        pass  # all is zero now, and zero it stays
    assert not any(tensor.any() for tensor in tensors.values())


@pytest.mark.slow
def test_smoke_of_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, result, chart = tmp_path / "disk", tmp_path / "result.json", tmp_path / "chart.png"
    place.mkdir()
    arguments = ["--path", str(place), "--vs", "dcp,torch", "--smoke", "--json", str(result), "--plot", str(chart)]
    assert main(["bench", "save", *arguments]) == 0
    content = json.loads(result.read_text())
    rows = {(row["contest"], row["name"]): row for row in content["rows"]}
    assert rows["save", "zk.save"]["ratio"].keys() == {"dcp", "dcp-2-threads", "torch"}
    assert {("save", "the bytes alone"), ("load", "the bytes alone"), ("load", "zk.load, new optimizer")} <= rows.keys()
    for how in ("checked first", 'verify="reading"'):
        loads = [row for (_, name), row in rows.items() if name.startswith("zk.load")]
        assert any(how in row["name"] + row["wiring"] for row in loads)
        assert all(row["ratio"].keys() == {"dcp", "torch"} for row in loads)
    assert rows[stall.NAME, "zk.save(wait=False)"]["ratio"].keys() == {stall.COPY, "dcp.async_save"}
    assert all(row["ns"] > 0 for row in rows.values())
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "training stands still" in capsys.readouterr().out
    assert list(place.iterdir()) == []
