"""`zerokern bench offload`: losses before speed, delayed ones against a delayed truth, memory by the system."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from zerokern.cli.main import main

asked, device, jobs, measure, memory, ours, rank, where = (
    import_module(f"zerokern.bench.offload.{name}")
    for name in ("asked", "device", "job", "measure", "memory", "ours", "rank", "where")
)
zero, plain, trainer, turns, zero_measure = (
    import_module(f"zerokern.bench.zero.{name}") for name in ("job", "plain", "trainer", "turns", "measure")
)
EFFORT = turns.Effort(rounds=2, steps=1, trial_rounds=1, trial_steps=1, check_steps=3)
MIB = 1 << 20


def silent(*_: object) -> None:
    return None


@pytest.fixture(scope="module")
def lone_seat(world: None) -> object:
    """A world of one rank in this process, with one thread as in the command's ranks."""
    return trainer.Seat(jobs.OffloadJob("tiny", "fp32", 1, 2, peers=("none", "fsdp2")), 0)


@pytest.mark.usefixtures("no_waiting")
class TestContest:
    def test_wrong_losses_of_ours_end_it(self, lone_seat, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ours clips at twice the norm of the others."""
        monkeypatch.setattr(ours, "MAX_NORM", 2 * zero.MAX_NORM)
        found = rank.contest(turns.Floor(lone_seat, silent), EFFORT, silent)
        assert found.keys() == {"wrong"}
        assert "zk sync: its loss in step" in found["wrong"]

    def test_a_delayed_step_that_is_not_late_is_wrong(self, lone_seat, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ours, "NAMES", (ours.DELAYED,))
        monkeypatch.setattr(ours, "keywords", lambda name: {})
        found = rank.contest(turns.Floor(lone_seat, silent), EFFORT, silent)
        assert "zk delayed: its loss in step 2" in found["wrong"]

    def test_the_schedules_train_alike_and_delayed_on_its_own(self, lone_seat) -> None:
        found = rank.contest(turns.Floor(lone_seat, silent), EFFORT, silent)
        losses = found["losses"]
        assert set(losses) == {*ours.NAMES, ours.RESIDENT, "fsdp2", plain.NAME}
        assert losses[ours.SYNC] == losses[ours.OVERLAP] == losses[ours.RESIDENT] != losses[ours.DELAYED]
        assert found["missing"] == {}


class TestMemory:
    @pytest.mark.slow
    def test_what_is_held_and_what_a_step_takes_for_a_while(self, lone_seat) -> None:
        """Of one that keeps 16 MiB and takes another 64 MiB in each step, the small model not counted."""

        def build(seat: object) -> object:
            kept = torch.ones(4 * MIB) if seat.job.model == "25M" else None

            def step(*batch: torch.Tensor) -> torch.Tensor:
                return torch.ones(16 * MIB).max() + (kept is None)

            return trainer.Trainer(step)

        def groups(seat: object) -> dict[str, object]:
            return {"hoarder": lambda: trainer.wirings("hoarder", lambda: build(seat))}

        job = jobs.OffloadJob("25M", "fp32", 1, 2, names=("hoarder",))
        found = memory.weigh(turns.Floor(trainer.Seat(job, 0), silent), groups)
        assert found["held"] == pytest.approx(16 * MIB, abs=2 * MIB)
        assert found["peak"] == pytest.approx(80 * MIB, abs=4 * MIB)


class TestMeasure:
    def test_what_was_asked_is_told(self) -> None:
        times = {"zk sync": [1.0], "zk overlap": [1.0], "deepspeed": [1.3]}
        turned = zero_measure.Turns(times, dict.fromkeys(times, 2.0))
        job = jobs.OffloadJob("25M", "bf16", 2, 6)
        rows = [zero_measure.row(name, "", job, [turned], ours.NAMES) for name in times]
        (sync, overlap) = asked.verdicts([measure.Outcome(job, rows, {}, {}, [], 1)])
        assert (sync["what"], sync["asked"], sync["met"]) == ("zk sync against deepspeed", 1.4, False)
        assert overlap["measured"] == 1.3
        other = jobs.OffloadJob("25M", "fp32", 2, 6)
        assert asked.verdicts([measure.Outcome(other, rows, {}, {}, [], 1)]) == []


def run(tmp_path: Path, *arguments: str) -> dict[str, object]:
    result, chart = tmp_path / "result.json", tmp_path / "chart.png"
    assert main(["bench", "offload", *arguments, "--json", str(result), "--plot", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(result.read_text())
    assert {"machine", "versions", "date", "commit", "command", "label", "asked"} <= content.keys()
    return content


class TestCommand:
    @pytest.mark.slow
    def test_smoke(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = run(tmp_path, "--smoke", "--vs", "none,fsdp2,torchao")
        rows = {row["name"]: row for row in content["rows"]}
        assert list(rows) == [*ours.NAMES, ours.RESIDENT, "fsdp2", plain.NAME]
        assert list(rows[ours.SYNC]["ratio"]) == [ours.RESIDENT, "fsdp2"]
        assert content["contests"][0]["missing"].keys() == {"torchao"}
        shown = capsys.readouterr().out
        assert "CPU, gloo: no claim for GPUs" in shown
        assert "zk delayed: the losses are right" in shown


class TestWhere:
    def test_without_a_gpu_it_says_what_needs_one(self, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(["bench", "offload", "--where"]) == 1
        assert "--where compares updates of parameters on a GPU" in capsys.readouterr().err

    @pytest.mark.parametrize("host_s, device_s, faster", [(0.004, 0.02, "host"), (0.02, 0.004, "device")])
    def test_the_faster_one_is_named(self, host_s: float, device_s: float, faster: str) -> None:
        steps = {"host": lambda: time.sleep(host_s), "device": lambda: time.sleep(device_s)}
        found = where.compared("asleep", steps, 6)
        assert found.faster == faster and found.ratio.median == pytest.approx(host_s / device_s, rel=0.5)
        assert where.lines([found])[-1].split()[-1] == faster

    def test_what_lies_within_the_noise_is_not_decided(self) -> None:
        even = where.Estimate(1.0, 0.99, 1.01)
        assert where.Found("even", {"host": even, "device": even}, even).faster == "either"

    def test_both_train_a_model_and_the_result_is_written(self, monkeypatch, tmp_path: Path, capsys) -> None:
        """On a CPU, where both update at the same place."""
        monkeypatch.setattr(where, "stage_here", lambda model: device.Stage(torch.device("cpu"), zero.MODELS[model]))
        monkeypatch.setattr(where, "TOKENS", 64)
        written = tmp_path / "where.json"
        assert main(["bench", "offload", "--where", "--smoke", "--json", str(written)]) == 0
        content = json.loads(written.read_text())
        assert [row["name"] for row in content["rows"]] == [f"GPT tiny, bf16, {name}" for name in where.NAMES]
        assert all(row["host_ns"] > 0 and row["device_ns"] > 0 for row in content["rows"])
        assert "host / device" in capsys.readouterr().out
