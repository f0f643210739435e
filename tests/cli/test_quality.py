"""bench.quality: its schedule, its verdict, and a run of a few steps."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import pytest
from tables import each

quality = import_module("zerokern.bench.quality")


def rows(exact: list[float], lossy: list[float]) -> list[dict]:
    pairs = [("exact", exact), ("int8-split8", lossy)]
    return [
        {"format": name, "seed": seed, "loss": value, "held_out": value}
        for name, values in pairs
        for seed, value in enumerate(values)
    ]


@each("lossy, holds", [([1.00, 1.21, 1.39], True), ([1.11, 1.31, 1.51], True), ([1.21, 1.41, 1.61], False)])
def test_the_gap_is_held_against_the_spread(lossy: list[float], holds: bool) -> None:
    """Exact runs at 1.0, 1.2 and 1.4 have a standard deviation of 0.2."""
    found = quality.summarize(rows([1.0, 1.2, 1.4], lossy), ["exact", "int8-split8"])["held_out"]
    assert found["exact_std"] == pytest.approx(0.2) and found["exact_range"] == pytest.approx(0.4)
    assert found["int8-split8"]["gap"] == pytest.approx(sum(lossy) / 3 - 1.2)
    assert found["int8-split8"]["holds"] is holds


@each("text", ["exact,int4", "exact,exact", ""])
def test_unknown_formats_are_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be torch, torch-bf16, exact-fp32"):
        quality.parse_formats(text)


def test_a_short_run_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, on a model that takes no time; the same seed gives both formats the same first loss."""
    from zerokern.examples.model import Shape

    monkeypatch.setattr(quality, "SHAPE", Shape(1, 64, 16))
    monkeypatch.setattr(quality, "HELD_OUT_BATCHES", 1)
    record = quality.Record(tmp_path / "quality.json", ["exact", "int8-split8"], 3)
    firsts = []
    for name in record.formats:
        ((step, losses),) = quality.train(quality.Job(name, seed=1, steps=3, widen=False))
        assert step == 3 and len(losses) == 4
        firsts.append(losses[0])
        record.add({"name": name, "format": name, "seed": 1, "loss": losses[-2], "held_out": losses[-1]})
        assert len(json.loads((tmp_path / "quality.json").read_text())["rows"]) == len(firsts)
    assert firsts[0] == firsts[1]
    assert [path.name for path in tmp_path.iterdir()] == ["quality.json"]
