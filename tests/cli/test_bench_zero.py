"""`zerokern bench zero`: whole steps on several ranks, losses before speed, ratios within rounds."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tables import each

from zerokern.cli.main import main

asked, jobs, launch, measure, ours, plain, rank, trainer, tuning, turns = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "zero.asked", "zero.job", "zero.launch", "zero.measure", "zero.ours", "zero.plain", "zero.rank",
        "zero.trainer", "zero.tuning", "zero.turns",
    )
)  # fmt: skip
offload, infinity = (import_module(f"zerokern.bench.{name}.job") for name in ("offload", "infinity"))
JOB = jobs.Job("tiny", "fp32", 2, 2)
ALL = (*ours.NAMES, plain.NAME, "ddp", "zero1", "fsdp2", "fsdp2-ours", "deepspeed-1", "deepspeed-2", "deepspeed-3")
EFFORT = turns.Effort(rounds=2, steps=1, trial_rounds=1, trial_steps=1, check_steps=3)


def silent(*_: object) -> None:
    return None


class TestJob:
    def test_it_travels_as_text(self) -> None:
        names = ("none",), {"none": "a wiring"}, ("none", "zk sync")
        for job, name in (
            (jobs.Job("25M", "bf16", 4, 6, 1, *names), "GPT 25M, bf16, 4 ranks"),
            (offload.OffloadJob("25M", "bf16", 4, 6, 1, *names, stage=3), "GPT 25M, bf16, 4 ranks, stage 3"),
            (infinity.InfinityJob("25M", "bf16", 2, 16, micro=8), "GPT 25M, bf16, 2 ranks, 8 micro-batches"),
        ):
            assert (type(job).from_json(job.to_json()), job.name) == (job, name)

    def test_everyone_starts_alike_and_the_caller_keeps_his_dice(self) -> None:
        before = torch.random.get_rng_state()
        one, other = JOB.build_model(), JOB.build_model()
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        assert torch.equal(before, torch.random.get_rng_state())

    @each("model, ranks, tp, says", [("25M", 3, 2, "divides --ranks, 3"), ("tiny", 2, 2, "1 of tiny")])
    def test_ranks_that_cannot_share_a_model_are_refused(self, model: str, ranks: int, tp: int, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            jobs.Job(model, "fp32", ranks, 2, tp=tp).refuse()


@pytest.fixture(scope="module")
def lone_seat(world: None) -> object:
    """A world of one rank in this process, with one thread as in the command's ranks."""
    return trainer.Seat(jobs.Job("tiny", "fp32", 1, 2, peers=("ddp",)), 0)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step returns is what it took."""

    def turn(floor: object, player: object, steps: int) -> float:
        return float(player.take(*floor.data.of_rank(0, 0)))

    monkeypatch.setattr(turns.Floor, "turn", turn)


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

    def test_everyone_takes_the_same_steps(self, lone_seat) -> None:
        told: list[dict[str, object]] = []
        found = rank.contest(turns.Floor(lone_seat, told.append), EFFORT, told.append)
        assert {name: len(times) for name, times in found["times"].items()} == dict.fromkeys(
            (*ours.NAMES, plain.NAME, "ddp"), 2
        )
        assert found["steps"] == EFFORT.check_steps + EFFORT.rounds * EFFORT.steps
        assert len({round(loss, 4) for loss in found["losses"].values()}) == 1  # one rank alone: all train alike
        assert [one["round"] for one in told if "round" in one] == [[1, 2], [2, 2]]

    def test_each_axis_is_raced_on_top_of_the_best_so_far(self, lone_seat, pretended: None) -> None:
        """Eight wirings, each axis with a fast and a slow choice: three races of two find the best."""
        built: list[tuple[int, int, int]] = []

        def build(way: int, clip: int, bucket: int) -> object:
            built.append((way, clip, bucket))
            return trainer.Trainer(lambda tokens, targets: 10.0 + 3 * clip - 5 * bucket + 2 * way)

        both = {"no": 0, "yes": 1}
        rivals = trainer.wirings("peer", build, way=both, clip=both, bucket=both)
        best = tuning._best(turns.Floor(lone_seat, silent), rivals, EFFORT)
        assert (best.wiring, len(built)) == ("no, no, yes", 6)

    @each("talk, wanted", [(16.0, 19), (5.0, 5), (0.5, 1)])
    def test_the_batch_is_where_ddp_communicates_as_asked(
        self, lone_seat, pretended: None, talk: float, wanted: int
    ) -> None:
        """4 ms a step, 2 ms a sequence and so much communication; the last is too little for any batch."""

        def alone(tokens: torch.Tensor, targets: torch.Tensor) -> float:
            return 4.0 + 2.0 * len(tokens)

        made = trainer.Trainer(lambda *batch: alone(*batch) + talk, alone)
        floor = turns.Floor(lone_seat, silent)
        batch, share = tuning.calibrated(floor, trainer.Candidate("ddp", {}, lambda: made), EFFORT)
        assert abs(batch - wanted) <= 1
        assert share == pytest.approx(talk / (4.0 + 2.0 * batch + talk))
        assert 0.25 <= share <= 0.30 or batch == 1


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

    @each("gib", [4, 12, 22, 500])
    def test_sets_hold_every_peer_once_and_ours_always(self, gib: int) -> None:
        sets = measure.split(ALL, jobs.Job("100M", "fp32", 2, 6), gib * 2**30)
        peers = [name for names in sets for name in names if name not in (*ours.NAMES, plain.NAME)]
        assert peers == list(ALL[4:])
        assert all(names[:4] == ALL[:4] for names in sets)
        assert (len(sets) == 1) == (gib == 500)

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
    def test_smoke(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(__file__).parents[2])  # a source tree, where zerokern has no bench
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
