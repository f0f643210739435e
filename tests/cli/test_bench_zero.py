"""`zerokern bench zero`: whole steps on several ranks, losses before speed, ratios within rounds."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tables import each

from zerokern.cli.main import main

asked, jobs, launch, measure, ours, plain, rank, trainer, turns = (
    import_module(f"zerokern.bench.zero.{name}")
    for name in ("asked", "job", "launch", "measure", "ours", "plain", "rank", "trainer", "turns")
)
JOB = jobs.Job("tiny", "fp32", 2, 2)
EFFORT = turns.Effort(rounds=2, steps=1, trial_rounds=1, trial_steps=1, check_steps=3)


def silent(*_: object) -> None:
    return None


class TestJob:
    @each("model, ranks, tp, says", [("25M", 3, 2, "divides --ranks, 3"), ("tiny", 2, 2, "1 of tiny")])
    def test_ranks_that_cannot_share_a_model_are_refused(self, model: str, ranks: int, tp: int, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            jobs.Job(model, "fp32", ranks, 2, tp=tp).refuse()


@pytest.fixture(scope="module")
def lone_seat(world: None) -> object:
    """A world of one rank in this process, with one thread as in the command's ranks."""
    return trainer.Seat(jobs.Job("tiny", "fp32", 1, 2, peers=("ddp",)), 0)


@pytest.mark.usefixtures("no_waiting")
class TestFloor:
    def test_wrong_losses_of_ours_end_the_contest(self, lone_seat, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ours clips at twice the norm of the others."""
        monkeypatch.setattr(ours, "MAX_NORM", 2 * jobs.MAX_NORM)
        found = rank.contest(turns.Floor(lone_seat, silent), EFFORT, silent)
        assert found.keys() == {"wrong"}
        assert "zk.shard stage 1: its loss in step" in found["wrong"]

    def test_a_peer_with_wrong_losses_is_named_and_left_out(self, lone_seat, monkeypatch: pytest.MonkeyPatch) -> None:
        ddp = import_module("zerokern.bench.peers.ddp")
        build = ddp.in_fp32

        def unscaled(*arguments: object, **more: object) -> object:
            made = build(*arguments, **more)
            return trainer.Trainer(lambda *batch: made.step(*batch) + 0.001)

        monkeypatch.setattr(ddp, "in_fp32", unscaled)
        found = rank.contest(turns.Floor(lone_seat, silent), EFFORT, silent)
        assert set(found["times"]) == {*ours.NAMES, plain.NAME}
        assert "ddp: its loss in step 1 is" in found["missing"]["ddp"]


class TestMeasure:
    def test_ratios_are_formed_within_rounds_and_sets(self) -> None:
        """The machine is three times slower in the second set: no ratio sees it, and each peer has one."""
        first = measure.Turns(
            {"zk.shard stage 1": [1.0, 2.0], "ddp": [1.5, 3.0]}, {"zk.shard stage 1": 2.0, "ddp": 2.0}
        )
        second = measure.Turns({"zk.shard stage 1": [3.0, 3.0], "zero1": [6.0, 6.0]}, {"zk.shard stage 1": 2.0})
        row = measure.row("zk.shard stage 1", "", JOB, [first, second], ours.NAMES)
        assert {peer: ratio.median for peer, ratio in row.ratio.items()} == {"ddp": 1.5, "zero1": 2.0}
        assert (row.ns.median, row.is_peer) == (2.5, False)
        peer = measure.row("ddp", "", JOB, [first, second], ours.NAMES)
        assert (peer.ratio, peer.is_peer) == ({}, True)

    def test_what_was_asked_is_told(self) -> None:
        stage = ours.name_of(1)
        found = measure.Turns({stage: [1.0], "ddp": [0.9], "zero1": [1.2]}, {stage: 2.0})
        job = jobs.Job("25M", "fp32", 2, 6)
        outcome = measure.Outcome(job, [measure.row(stage, "", job, [found], ours.NAMES)], {}, 0.27, [], 1)
        met = {one["what"]: one["met"] for one in asked.verdicts([outcome])}
        assert met == {"stage 1 against ddp": False, "stage 1 against zero1": True}
        assert len(asked.verdict_lines(asked.verdicts([outcome]))) == 3


class TestLaunch:
    def test_a_rank_that_dies_ends_the_others_and_leaves_its_last_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = (
            "import os, sys, time; print('rank', os.environ['RANK'], flush=True)\n"
            "sys.exit('out of luck') if os.environ['RANK'] == '1' else time.sleep(600)"
        )
        begun: list[object] = []
        popen = launch.subprocess.Popen

        def instead(command: list[str], **how: object) -> object:
            begun.append(popen([sys.executable, "-c", program], **how))
            return begun[-1]

        monkeypatch.setattr(launch.subprocess, "Popen", instead)
        with pytest.raises(launch.RankFailed, match="rank 1 ended with status 1:\n  rank 1\n  out of luck"):
            launch.run_ranks("contest", JOB, EFFORT, silent, silent)
        assert [process.returncode is not None for process in begun] == [True, True]


def run(tmp_path: Path, *arguments: str) -> dict[str, object]:
    result, chart = tmp_path / "result.json", tmp_path / "chart.png"
    assert main(["bench", "zero", *arguments, "--json", str(result), "--plot", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    content = json.loads(result.read_text())
    assert {"machine", "versions", "date", "commit", "command", "label", "asked"} <= content.keys()
    for row in content["rows"]:
        assert {"name", "ns", "tokens_per_s", "roof_share", "loss", "ratio"} <= row.keys()
        for peer, ratio in row["ratio"].items():
            low, high = row["ratio_interval"][peer]
            assert low <= ratio <= high
    return content


class TestCommand:
    @pytest.mark.slow
    def test_smoke(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        content = run(tmp_path, "--smoke", "--vs", "ddp,zero1,fsdp2,fsdp2-ours")
        names = [row["name"] for row in content["rows"]]
        assert names == [*ours.NAMES, "ddp", "zero1", "fsdp2", "fsdp2-ours", plain.NAME]
        assert list(content["rows"][0]["ratio"]) == names[3:-1]
        shown = capsys.readouterr().out
        assert "CPU, gloo: no claim for GPUs" in shown
        assert "fsdp2-ours: the losses are right" in shown

    @pytest.mark.slow
    def test_tuned_against_deepspeed(self, tmp_path: Path) -> None:
        """Minutes where DeepSpeed has to compile first."""
        content = run(tmp_path, "--model", "tiny", "--dtype", "bf16", "--pairs", "1", "--vs", "ddp,deepspeed")
        (found,) = content["contests"]
        assert found["sequences_per_rank"] >= 1
        assert 0 <= found["ddp_communication_share"] < 1
        assert {"ddp", plain.NAME} <= found["peers"].keys()
        assert "deepspeed" in found["missing"] or {"deepspeed-1", "deepspeed-2", "deepspeed-3"} <= found["peers"].keys()

    def test_wrong_losses_get_no_time(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(measure, "run_ranks", lambda *_: {"wrong": "zk.shard stage 2: its loss in step 2 is 7"})
        assert main(["bench", "zero", "--smoke"]) == 1
        shown = capsys.readouterr()
        assert "its loss in step 2 is 7; no speed is told of a wrong result" in shown.err
        assert "tokens/s" not in shown.out
