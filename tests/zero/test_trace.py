"""zk.trace and the names that a profile has: who gathers, who reduces, who updates, in whatever thread."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import nn
from worlds import World, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import IoError, StateError
from zerokern.schedule import ranges

VERBS = ("unshard", "wait", "reduce", "update", "publish")


def layers() -> nn.Module:
    model = nn.Module()
    model.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    model.forward = lambda x: model.layers(x)
    return model


def names_in(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {one["name"] for one in events if one.get("ph") == "X" and one["name"].split(" ")[0] in VERBS}


def steps(model: nn.Module, opt: Any, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.flush()


@ranked
def traced(world: World, folder: Path, stage: int, schedule: str, wanted: set[str]) -> None:
    model = layers()
    units = {"units": list(model.layers)} if stage == 3 else {"bucket_bytes": 4 * 72}
    zk.shard(model, stage=stage, **units)
    opt = zk.AdamW(model.parameters(), tier="cpu", schedule=schedule)
    steps(model, opt, 2)
    with zk.trace(folder / "trace.json") as profile:
        steps(model, opt, 2)
    found = names_in(folder / f"trace.rank{world.rank}.json")
    assert wanted <= found, found
    assert {event.key for event in profile.key_averages()} >= {"aten::linear"}


@pytest.mark.parametrize(
    ("stage", "schedule", "wanted"),
    [
        (2, "sync", {"reduce bucket 0", "reduce bucket 1", "update all"}),
        (2, "overlap", {"reduce bucket 1", "update bucket 0", "update bucket 1", "publish bucket 1"}),
        (3, "overlap", {"unshard layers.0", "unshard layers.1", "wait for layers.1", "reduce layers.0"}),
    ],
)
def test_ranges_of_a_loop_on_two_ranks(stage: int, schedule: str, wanted: set[str], tmp_path: Path) -> None:
    on_ranks(2, traced, tmp_path, stage, schedule, wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]


def test_a_profile_of_ones_own_has_them(tmp_path: Path) -> None:
    model = layers()
    opt = zk.AdamW(model.parameters(), tier="cpu")
    with torch.profiler.profile() as profile:
        steps(model, opt, 1)
    assert "update all" in {event.key for event in profile.key_averages()}


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: pytest.fail(name))
    assert ranges.named("unshard", "layers.3") is ranges.named("Step", "bucket 2")
    with ranges.named("unshard", "layers.3"), ranges.named("unshard", "layers.3"):  # as nested waits have it
        pass


def test_what_a_loop_raises_comes_through_and_the_trace_is_written(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), zk.trace(tmp_path / "trace.json"):
        torch.ones(2).sum().item() / 0
    assert "aten::sum" in (tmp_path / "trace.json").read_text()
    with zk.trace(tmp_path / "again.json"):
        torch.ones(2).sum()
    assert (tmp_path / "again.json").exists()


@each("name, says", [("there.json", "exists already"), ("no/trace.json", "no folder")])
def test_what_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(IoError, match=says), zk.trace(tmp_path / name):
        pytest.fail("the loop has begun")
    assert (tmp_path / "there.json").read_text() == "mine"
    with (
        torch.profiler.profile(),
        pytest.raises(StateError, match="a profiler is running already"),
        zk.trace(tmp_path / "t.json"),
    ):
        pytest.fail("the loop has begun")


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    """torch logs it, and raises nothing; nor does it look whether a file has come meanwhile."""
    with pytest.raises(IoError, match=r"/proc/trace\.json"), zk.trace("/proc/trace.json"):
        pytest.fail("the loop has begun")
    (tmp_path / "gone").mkdir()
    with pytest.raises(IoError, match="could not be written"), zk.trace(tmp_path / "gone" / "trace.json"):
        shutil.rmtree(tmp_path / "gone")
    with zk.trace(tmp_path / "mine.json"), pytest.raises(FileExistsError):
        (tmp_path / "mine.json").open("x")
