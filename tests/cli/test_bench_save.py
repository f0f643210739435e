"""`zerokern bench save`: whole states against torch's ways and the disk, each checked before it is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from zerokern.cli.main import main

save, stall, contest, shapes = (
    import_module(f"zerokern.bench.{name}") for name in ("disk.save", "disk.stall", "contest", "shapes")
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The disk is probed once for this file, and not into anybody's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def training():
    return save.Training(shapes.shape("flat", 5000))


def test_the_state_is_twelve_bytes_per_parameter(training) -> None:
    assert training.nbytes == save.NBYTES_PER_PARAMETER * 5000 + 4, "and the step"


def test_what_loads_other_values_gets_no_time(training) -> None:
    tensors = training.tensors()
    with pytest.raises(contest.WrongResult, match=r"somebody: model.0 and \d others"), training.compared("somebody"):
        pass
    with training.compared("somebody"):
        pass  # all is zero now, and zero it stays
    assert not any(tensor.any() for tensor in tensors.values())


@pytest.mark.slow
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, result, chart = tmp_path / "disk", tmp_path / "result.json", tmp_path / "chart.png"
    place.mkdir()
    arguments = ["--path", str(place), "--vs", "dcp,torch", "--smoke", "--json", str(result), "--plot", str(chart)]
    assert main(["bench", "save", *arguments]) == 0
    content = json.loads(result.read_text())
    rows = {(row["contest"], row["name"]): row for row in content["rows"]}
    assert rows["save", "zk.save"]["ratio"].keys() == {"dcp", "dcp-2-threads", "torch"}
    for how in ("checked first", 'verify="reading"'):
        loads = [row for (_, name), row in rows.items() if name.startswith("zk.load")]
        assert any(how in row["name"] + row["wiring"] for row in loads)
        assert all(row["ratio"].keys() == {"dcp", "torch"} for row in loads)
    assert rows[stall.NAME, "zk.save(wait=False)"]["ratio"].keys() == {stall.COPY, "dcp.async_save"}
    assert all(row["ns"] > 0 for row in rows.values())
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "training stands still" in capsys.readouterr().out
    assert list(place.iterdir()) == []


def test_an_option_that_means_nothing_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "save"]) == 2
    assert "a folder with io, save and --tier nvme" in capsys.readouterr().err
