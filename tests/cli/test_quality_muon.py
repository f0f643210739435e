"""bench.quality_muon: what it runs, in which order, and what it makes of it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

quality = import_module("zerokern.bench.quality_muon")


def row(rule: str, seed: int, lr: float, steps: int, loss: float) -> dict[str, Any]:
    name = quality.Run(rule, seed, lr, steps).name
    return {"name": name, "rule": rule, "seed": seed, "lr": lr, "steps": steps, "held_out": loss}


def test_both_are_tuned_alike_before_anything_is_compared() -> None:
    tuned, rows = quality.TUNED_ON, []
    first = list(quality.missing(rows, 100, 2))
    assert {(one.rule, one.lr) for one in first} == {(rule, lr) for rule in quality.RULES for lr in quality.RATES[rule]}
    assert {(one.rule, one.seed, one.steps) for one in first} == {("adamw", tuned, 100), ("muon", tuned, 50)}
    best = {rule: rates[1] for rule, rates in quality.RATES.items()}
    for one in first:
        rows.append(row(one.rule, tuned, one.lr, one.steps, 2.0 - (one.lr == best[one.rule])))
    compared = list(quality.missing(rows, 100, 2))
    assert {(one.rule, one.lr) for one in compared} == set(best.items())
    assert [(one.rule, one.steps) for one in compared if one.seed == 1] == [("adamw", 100), ("muon", 50), ("muon", 25)]


def test_tokens_for_adamws_loss() -> None:
    """Reached on the way, with the half of the steps already, and not at all."""
    rows = [row("adamw", seed, 1e-3, 100, 2.0) for seed in range(3)]
    losses = [(1.0, 3.0), (1.5, 1.9), (2.1, 3.0)]
    rows += [
        row("muon", seed, 1e-3, steps, loss)
        for seed in range(3)
        for steps, loss in zip((50, 25), losses[seed], strict=True)
    ]
    tuned = [row(rule, quality.TUNED_ON, 1e-3, 50, 1.0) for rule in quality.RULES]
    found = quality.summarize([*tuned, *rows])
    assert [one["share"] for one in found["seeds"]] == [pytest.approx(0.125**0.5, abs=1e-4), 0.25, None]
    assert quality.summarize([*tuned, *rows[:-1]])["seeds"] == found["seeds"][:2], "seeds that are complete"


def test_it_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zerokern.examples.model import Shape

    monkeypatch.setattr(quality, "SHAPE", Shape(1, 64, 16))
    monkeypatch.setattr(quality, "RATES", dict.fromkeys(quality.RULES, (1e-3, 2e-3)))
    monkeypatch.setattr(quality, "HELD_OUT_BATCHES", 1)
    words = ["--steps", "4", "--seeds", "1", "--json", str(tmp_path / "found.json")]
    quality.main([*words, "--runs", "3"])
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 3
    quality.main(words)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len({one["name"] for one in found["rows"]}) == len(found["rows"]) == 4 + 3
    told = capsys.readouterr().out
    assert told.count("seed 0: held out") == 1 and len(found["summary"]["seeds"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    with pytest.raises(ValueError, match=r"found\.json"):
        quality.main([*words, "--steps", "8"])
