"""`zerokern bench offload --hidden` and `infinity --hidden`: what is foretold before anything runs, and the result."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from tables import each

from zerokern.cli.main import main
from zerokern.core import native
from zerokern.schedule.recorder import Event

hidden, resting = (import_module(f"zerokern.bench.{name}.hidden") for name in ("offload", "infinity"))
foretold = import_module("zerokern.bench.foretold")
RATES = hidden.Rates(update_numel_s=1e9, norm_gb_s=20.0, device_gb_s=20.0, op_us=0.0)


@pytest.fixture(autouse=True)
def threads():
    before = native.threads()
    yield
    native.set_threads(before)


def by_hand(case: hidden.Case) -> float:
    """Seconds of a step of even units: what lies one behind the other, added up."""
    count, numel = len(case.units), case.units[0]
    compute = count * (case.forward_ms + case.backward_ms) / 1e3
    down, up = (2 * numel / rate / 1e9 for rate in (case.down_gb_s, case.up_gb_s))
    norm, update = 2 * count * numel / RATES.device_gb_s / 1e9, numel / RATES.update_numel_s  # gradients are read there
    if case.schedule == "sync":
        return compute + count * (down + update + up) + norm
    return compute + count * down + norm + max(update + count * up, count * update + up)  # plain tensors: in step()


@each("index", [0, 1, 2, 3])
def test_it_foretells_what_adding_up_says(index: int) -> None:
    """Putting in place is a copy of its own on the device, and not part of what is added up."""
    case = hidden.CASES[index]
    said = hidden.foretell(case, RATES)
    placed = 2 * 2 * sum(case.units) / RATES.device_gb_s / 1e9
    assert by_hand(case) <= said.step_s * (1 + 1e-6) and said.step_s <= by_hand(case) + placed + 1e-6
    assert said.bound_s <= said.step_s * (1 + 1e-6)


def test_steps_are_counted_from_forward_to_forward(monkeypatch) -> None:
    begins = [0, 50, 90, 120, 150, 180, 215, 250, 290, 330, 370, 400, 450]
    events = [Event(step, "device", "Forward", "0", at, at + 5, 0) for step, at in enumerate(begins, 1)]
    monkeypatch.setattr(hidden, "_events", lambda case, steps: events)
    step, _ = hidden.run_case(hidden.SMOKE[0], 8)
    # steps 1 to 4 warm up; the time of 5 to 8, and of 9 to 12
    assert (step.low, step.high) == ((290 - 150) / 4, (450 - 290) / 4)


def test_a_small_run(tmp_path: Path, capsys) -> None:
    written = tmp_path / "hidden.json"
    assert main(["bench", "offload", "--hidden", "--smoke", "--json", str(written)]) == 0
    out = capsys.readouterr().out
    assert "of bound: at most" in out and "error: within 10% in" in out
    content, told = (json.loads(path.read_text()) for path in (written, tmp_path / "hidden.foretold.json"))
    assert content["foretold"] == told
    assert [row["name"] for row in content["rows"]] == ["overlap: a few steps", "delayed: a few steps"]
    assert content["foretold"]["date"] <= content["date"]
    for row, said in zip(content["rows"], content["foretold"]["cases"], strict=True):
        assert row["foretold_ns"] == pytest.approx(said["step_s"] * 1e9) and row["ns"] > 0


# `infinity`: parameters and state at rest.


@pytest.mark.slow
def test_a_small_run_of_parameters_at_rest(tmp_path: Path, capsys) -> None:
    written = tmp_path / "hidden.json"
    assert main(["bench", "infinity", "--hidden", "--smoke", "--path", str(tmp_path), "--json", str(written)]) == 0
    assert "within 10% in" in capsys.readouterr().out
    content, told = (json.loads(path.read_text()) for path in (written, tmp_path / "hidden.foretold.json"))
    assert content["foretold"] == told
    assert [row["name"] for row in content["rows"]] == ["overlap: a few steps", "sync: a few steps"]
    for row, said in zip(content["rows"], content["foretold"]["cases"], strict=True):
        assert row["foretold_ns"] == pytest.approx(said["step_s"] * 1e9) and row["ns"] > 5e6
    assert not [one for one in tmp_path.iterdir() if one.is_dir()]


def test_what_lies_further_off_is_counted() -> None:
    told = foretold.Told(1.0, 0.5, 0.3)
    rows = [foretold.Row(resting.SMOKE[0], told, foretold.Estimate(ns, ns, ns), None) for ns in (1.05e9, 0.91e9, 1.2e9)]
    rates = resting.Rates(1e9, 2e9, 2.0, 1.0, 0.5, {})
    text = "\n".join(foretold.lines(foretold.Outcome("now", rates, rates, tuple(rows))))
    assert "within 10% in 2 of 3 cases" in text and "at most 20.0%" in text
