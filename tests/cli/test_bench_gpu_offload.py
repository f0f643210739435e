"""The sections of `bench/gpu.sh` that train: who trains wrongly is not timed, and the worst is what is told of."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tables import each

asked, case, contest, device, offload, plain, run, sections, settings, timers, training, watch, zero = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "gpu.asked", "offload.case", "contest", "offload.device", "gpu.sections.offload", "gpu.peers.plain_training",
        "run", "gpu.sections", "gpu.settings", "timers", "gpu.training", "offload.watch", "gpu.sections.zero",
    )
)  # fmt: skip
NAMES = [zero.name_of(stage, zero.ALONE) for stage in zero.STAGES]
STAGE = device.Stage(torch.device("cpu"), offload.TOY)
KIND = f"{offload.RESIDENT}, int8"
SMALL = case.Case(device.SYNC, "exact", 6, 512, 32, (32,), 3, "cpu")


@pytest.mark.slow
def test_the_sections_that_run_alone_are_rehearsed(tmp_path: Path) -> None:
    # in a process of its own: sections are forks, and one of this process, which has OpenMP threads, would wait for
    # threads that a fork does not have. All at once: each case is a process, and starting those takes most of the time
    program = """import sys; from pathlib import Path; from zerokern.bench.gpu import runner, settings
sys.exit(runner.Run(Path(sys.argv[1]), sys.argv[2:], settings.Settings(True), 2000.0, "test").run())"""
    names = [section.name for section in sections.ALONE]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROKERN_THREADS": "1"}  # as bench/gpu.sh has it
    command = [sys.executable, "-c", program, str(tmp_path), *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=one_thread)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "rehearsal.json").read_text())
    assert set(found["took"]) == set(names) and found["could_not"] == []
    assert {line["key"]: line["measured"] for line in found["asked"]} == {
        one.key: "rehearsed" for one in asked.ASKED_ALONE
    }
    assert {who: why for about in found["contests"] for who, why in about["missing"].items()} == {}
    assert not {"seconds", "tokens_per_s", "host_bytes_per_param"} & set(json.dumps(found).replace('"', " ").split())


class TestEntrants:
    def test_delayed_must_be_late_and_others_must_not(self, world: None) -> None:
        exact, late = (device.truth(STAGE, STAGE.batch(64), delayed) for delayed in (False, True))
        assert late[:2] == pytest.approx([exact[0]] * 2) and late[2] == pytest.approx(exact[1])
        for name, truth in ((device.SYNC, late), (device.DELAYED, exact)):
            entrant = training.Entrant(
                name, lambda name=name: device.ours(STAGE, name, "exact"), lambda truth=truth: truth, STAGE.batch(64)
            )
            with pytest.raises(contest.WrongResult, match=f"{name}: the loss of step 2 is"):
                entrant.check()


class Desk:
    """Notes what it is told."""

    def __init__(self, rehearse: bool = False) -> None:
        self.settings = settings.Settings(rehearse)
        self.figures, self.facts, self.refused = {}, {}, {}

    def figure(self, key: str, value: object, of: str = "") -> None:
        self.figures[key] = (value, of)

    def fact(self, name: str, value: object) -> None:
        self.facts[name] = value

    def could_not(self, key: str, why: str) -> None:
        self.refused[key] = why


def outcome_of(ratios: dict[tuple[str, str], float], missing: dict[str, str] | None = None) -> object:
    """Rows by name, with their ratios to peers."""
    one = timers.Estimate(1.0, 1.0, 1.0)
    rows = [
        run.Row(
            name, one, 1.0, 1, "", math.nan,
            {peer: timers.Estimate(of, of - 0.01, of + 0.01) for (who, peer), of in ratios.items() if who == name},
        )
        for name in dict.fromkeys(who for who, _ in ratios)
    ]  # fmt: skip
    return run.Outcome("step", rows, {plain.OURS: {"wiring": "plain parameters"}}, missing or {}, "", {})


class TestJudge:
    def test_the_worst_number_of_tokens_is_told_of_from_where_it_is_asked(self) -> None:
        late, early, exact = f"{device.DELAYED}, int8", f"{device.OVERLAP}, int8", f"{device.OVERLAP}, exact"
        shares = {4096: (0.3, 0.4), 16384: (0.97, 0.8), 32768: (0.96, 0.93), 65536: (0.99, 0.95)}
        found = {
            count: outcome_of(
                {
                    (late, KIND): delayed,
                    (early, KIND): overlap,
                    (exact, "deepspeed"): 2.0 + overlap,
                    (exact, case.COMPUTE): delayed,
                },
                {"fsdp2": "not today"},
            )
            for count, (delayed, overlap) in shares.items()
        }
        desk = Desk()
        offload.judge(desk, found)
        told = {key: (round(value.median, 3), of) for key, (value, of) in desk.figures.items()}
        assert told == {
            "offload.delayed": (0.96, f"{late}, 32,768 tokens"),
            "offload.overlap": (0.93, f"{early}, 32,768 tokens"),
            "offload.deepspeed": (2.4, f"{exact}, 4,096 tokens"),
            "offload.exposed": (4.0, f"{exact}, 32,768 tokens"),  # of 16k tokens on: 3 %, 4 %, 1 %
        }
        assert desk.refused == {"offload.fsdp2": "not today"}


class TestSpeeds:
    def test_a_step_is_told_as_a_share_of_what_the_device_can_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        outcome = outcome_of({("zk", case.COMPUTE): 0.95})
        rows = [dataclasses.replace(outcome.rows[0], ns=timers.Estimate(0.4e9, 0.4e9, 0.4e9))]
        desk = Desk()
        outcome = dataclasses.replace(outcome, rows=rows)
        training.tell_speeds(desk, "title", outcome, zero.LARGE, 16384, case.COMPUTE)
        told = desk.facts["title: whole steps"]
        assert (told["device"], told["peak_tflops"]) == ("NVIDIA H100 80GB HBM3", 989.4)
        flops = 6 * zero.LARGE.numel + 12 * 20 * 2048 * 1024
        assert told["rows"]["zk"] == {
            "tokens_per_s": 40960, "mfu": round(40960 * flops / 989.4e12, 4), "exposed_percent": 5.0
        }  # fmt: skip


class TestWatch:
    @pytest.mark.slow
    def test_host_memory_is_what_the_system_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parameters, gradients, remainders, two states: 14 B a parameter, and what a step of this size needs."""
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        found = watch.run_case(SMALL, tmp_path / "log", 120)
        assert found.failed == "" and found.numel == SMALL.shape.numel
        (told,) = found.told
        assert told["tokens"] == 32 and len(told["losses"]) == 3 and told["seconds"] > 0
        assert found.at(32) == told and found.at(64) == {}
        assert 14.0 <= found.host_per_parameter <= 19.0

    def test_one_that_is_late_is_stopped(self, tmp_path: Path) -> None:
        found = watch.run_case(SMALL, tmp_path / "log", 0.3)
        assert found.failed.startswith("stopped after 0 s")
        assert found.told == []


# The section `zero`.


@each("stage", zero.STAGES)
def test_a_stage_that_forgets_its_update_is_found(stage: int) -> None:
    where = device.Stage(torch.device("cpu"), zero.TOY, recompute=False)

    def lazy(place: object) -> object:
        model = zero.zk.shard(where.model(), stage=stage)
        return device.Trainer(device.plain_loop(model, lambda: model.zero_grad()))

    (one,) = zero.Field(where, 128, 128).provider("lazy", lazy, 1.0)
    with pytest.raises(contest.WrongResult, match=r"lazy: the loss of step [234] is 5\.\d+, in fp32 it is"):
        one.check()


def test_the_slowest_stage_is_told_of() -> None:
    desk = Desk()
    zero._judge(
        desk,
        outcome_of({(name, plain.OURS): ratio for name, ratio in zip(NAMES, (1.0, 0.99, 0.8, 1.1), strict=True)}),
        NAMES,
    )
    value, of = desk.figures["zero.overhead"]
    assert value.median == pytest.approx(25.0) and value.low < 25.0 < value.high
    assert of == f"{NAMES[2]}, vs zk.AdamW on plain parameters"
    assert desk.facts == {
        "zero: overhead in % of the step, vs zk.AdamW": dict(zip(NAMES, (0.0, 1.01, 25.0, -9.09), strict=True))
    }


def test_each_stage_is_judged_against_the_fsdp2_that_gathers_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 3, which gathers twice, stood beside an FSDP2 that gathers once, and had no figure."""
    for key in ("zero", "ranks"):
        assert {f"{key}.fsdp2_stage{number}" for number in (2, 3)} <= {one.key for one in asked.ASKED}
    where = device.Stage(torch.device("cpu"), zero.TOY, recompute=False)
    contest_ = zero._at_scale(where, None, "gloo", 128)
    assert set(plain.FSDP2.values()) <= set(contest_.peers)
    made: list = []
    monkeypatch.setattr(plain, "fully_shard", lambda module, **how: made.append(how.get("reshard_after_forward")))
    for number in plain.FSDP2:
        plain.fsdp2(where, number)
    assert made == [*[False] * zero.TOY.layers, None, *[True] * zero.TOY.layers, None]  # None: the root
