"""`zerokern bench infinity --largest`: the whole life of a model on disk, with a bound that the plan gives."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from zerokern.cli.main import main

largest, life = (import_module(f"zerokern.bench.infinity.{name}") for name in ("largest", "life"))
MB = 10**6
# what no plan counts: activations, what autograd and matrix products make for themselves, and rests on their way out
BESIDE = 160 * MB


def test_both_lives_go_on_with_the_same_bits(tmp_path: Path) -> None:
    case = life.Case(largest.shape_of(20_000), str(tmp_path), 1 << 30)
    told: dict[str, Any] = {}
    for which in (life.BEGIN, life.RESUME):
        life.Life(case, lambda name, work, which=which: told.update({f"{which} {name}": work()})).run(which)
    after = f"step {life.STEPS + 1}"
    assert told[f"begin {after}"] == told[f"resume {after}"]
    assert len(told) == largest.PARTS and not case.saved.exists() and Path(tmp_path, "exported").exists()
    assert torch.get_default_dtype() is torch.float32


def test_the_plan_knows_that_gradients_wait_on_the_disk() -> None:
    shape = largest.shape_of(20 * 10**6)  # the harness gives tensors on the meta device memory
    plan = largest.planned(shape, 60 * MB)
    assert plan.settings.spills and plan.missing
    assert plan.tiers["nvme"] / shape.numel == pytest.approx(4 + 3.06, abs=0.01)
    assert not largest.planned(shape, 4 * 10**9).settings.spills


@pytest.mark.parametrize(
    "words, says",
    [
        (["--largest", "6B"], "path"),
        (["--cap", "4GB"], "--cap"),
        (["--largest", "6B", "--micro", "4", "--path", "."], "--micro"),
    ],
)
def test_what_does_not_fit_together_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "infinity", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.serial
def test_a_model_lives_in_the_memory_that_the_plan_names(tmp_path: Path) -> None:
    result = tmp_path / "largest.json"
    words = ["--largest", "200M", "--cap", "400MB", "--path", str(tmp_path), "--json", str(result)]
    assert main(["bench", "infinity", *words]) == 0
    found = json.loads(result.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == largest.PARTS and found["asked"][0]["met"]
    planned = found["planned"]["memory"]
    assert max(row["peak"] for row in rows.values()) <= planned + BESIDE
    moved = {name: (rows[name]["read"], rows[name]["written"]) for name in ("begin: build", "resume: load")}
    numel = found["model"]["numel"]
    assert moved["begin: build"][0] < 0.1 * numel, "what has been built is not read"
    assert moved["resume: load"][1] == pytest.approx(5.06 * numel, rel=0.05)
    assert [one.name for one in tmp_path.iterdir()] == [result.name]
