"""`zerokern bench infinity --hidden`: what plans foretell of steps at rest, that they say so before anything runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from zerokern.cli.main import main

hidden = import_module("zerokern.bench.infinity.hidden")
foretold = import_module("zerokern.bench.foretold")
DISK = {"read_gb_s": 2.0, "write_gb_s": 1.0, "both_gb_s": 0.5}


def rates(*cases: hidden.Case) -> hidden.Rates:
    """Of a machine on which compute is as long as it is played."""
    played = {
        hidden.name_of(one): one.micro * one.accumulate * (one.forward_ms + one.backward_ms) / 1e3 for one in cases
    }
    return hidden.Rates(update_numel_s=1e9, update_int8_numel_s=2e9, compute_s=played, **DISK)


def case(name: str, schedule: str) -> hidden.Case:
    return next(one for one in hidden.CASES if (one.name, one.schedule) == (name, schedule))


def test_where_compute_is_long_it_is_all_there_is() -> None:
    one = hidden.Case("long", "delayed", hidden.EVEN, 20_000, 40_000)
    said = hidden.foretell(one, rates(one))
    assert 60.0 <= said.step_s <= 60.1 and said.hidden > 0.99


def test_where_compute_is_short_the_disk_decides() -> None:
    """14 bytes are read and 12 written per parameter: both ways as long as the shorter lasts, then one alone."""
    one = hidden.Case("short", "delayed", hidden.EVEN, 1, 2)
    numel = sum(one.units) / 1e9
    last = 2 * one.units[-1] / 1e9  # of the unit where forward turns, which is not read again
    said = hidden.foretell(one, rates(one))
    bound = 12 * numel / DISK["both_gb_s"]
    assert said.bound_s <= said.step_s and bound <= said.step_s <= bound + (2 * numel - last) / DISK["read_gb_s"] + 0.2


def test_micro_batches_one_after_the_other_read_parameters_each_time() -> None:
    orders = [case(f"all on disk, 4 micro-batches, {order}", "overlap") for order in ("vertical", "horizontal")]
    vertical, horizontal = (hidden.foretell(one, rates(one)) for one in orders)
    assert vertical.step_s < horizontal.step_s


def test_int8_is_updated_at_its_own_rate() -> None:
    one = hidden.Case("int8", "sync", hidden.EVEN, 1, 2, params="cpu", state="cpu", form="int8")
    assert hidden.foretell(one, rates(one)).step_s == pytest.approx(3e-3 + sum(one.units) / 2e9, abs=1e-6)


def test_there_are_cases_enough() -> None:
    assert len(hidden.CASES) >= 10
    assert len({(one.name, one.schedule) for one in hidden.CASES}) == len(hidden.CASES)


def test_a_small_run(tmp_path: Path, capsys) -> None:
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
    rows = [foretold.Row(hidden.SMOKE[0], told, foretold.Estimate(ns, ns, ns), None) for ns in (1.05e9, 0.91e9, 1.2e9)]
    text = "\n".join(foretold.lines(foretold.Outcome("now", rates(), rates(), tuple(rows))))
    assert "within 10% in 2 of 3 cases" in text and "at most 20.0%" in text
