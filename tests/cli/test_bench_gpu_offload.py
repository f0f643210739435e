"""The sections of `bench/gpu.sh` that train: who trains wrongly is not timed, and the worst is what is told of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tables import each

asked, contest, device, infinity, offload, offload7b, offloadmax, run, sections, settings, syncs, timers, watch = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "gpu.asked", "contest", "offload.device", "gpu.sections.infinity", "gpu.sections.offload",
        "gpu.sections.offload7b", "gpu.sections.offloadmax", "run", "gpu.sections", "gpu.settings", "offload.syncs",
        "timers", "offload.watch",
    )
)  # fmt: skip
case, plain, training, zero = (
    import_module(f"zerokern.bench.{name}")
    for name in ("offload.case", "gpu.peers.plain_training", "gpu.training", "gpu.sections.zero")
)
NAMES = [zero.name_of(stage, "no process group") for stage in zero.STAGES]
STAGE = device.Stage(torch.device("cpu"), offload.TOY)
KIND = f"{offload.RESIDENT}, int8"
SMALL = case.Case(device.SYNC, "exact", 6, 512, 32, (32,), 3, "cpu")


@pytest.mark.slow
@each("name", [section.name for section in sections.ALONE])
def test_a_section_is_rehearsed(name: str, tmp_path: Path) -> None:
    # in a process of its own: sections are forks, and one of this process, which has OpenMP threads, would wait for
    # threads that a fork does not have
    program = "import sys; from zerokern.bench.gpu.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--rehearse", str(tmp_path), name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / f"rehearsal-{name}.json").read_text())
    absent = {one["key"] for one in found["could_not"] if "is not installed" in one["why"]}
    assert [one for one in found["could_not"] if one["key"] not in absent] == []
    wanted = [one.key for one in asked.ASKED_ALONE if one.section == name]
    outcome = {key: "not measured" if key in absent else "rehearsed" for key in wanted}
    assert {line["key"]: line["measured"] for line in found["asked"]} == outcome
    missing = {who: why for about in found["contests"] for who, why in about["missing"].items()}
    expected = "is not installed", "needs a GPU"  # here there may be the one, and there is none of the other
    assert {who: why for who, why in missing.items() if not any(one in why for one in expected)} == {}
    assert not {"seconds", "tokens_per_s", "host_bytes_per_param"} & set(json.dumps(found).replace('"', " ").split())


@pytest.fixture(scope="module")
def course(world: None) -> dict[str, list]:
    """Everyone of the contest at toy size, in a world of one rank."""
    return offload.entrants(STAGE, 64)


class TestEntrants:
    @each("form", device.FORMATS)
    def test_ours_have_the_losses_of_fp32(self, course, form: str) -> None:
        mine = [entrant for entrant, kept in (*course[""], *course[f"{offload.RESIDENT}, {form}"]) if kept == form]
        assert len(mine) == 4
        for entrant in mine:
            entrant.check()
            entrant.batch = entrant.checked_on
            entrant.run()
            entrant.settle()

    def test_delayed_must_be_late_and_others_must_not(self, course) -> None:
        exact, late = (device.truth(STAGE, STAGE.batch(64), delayed) for delayed in (False, True))
        assert late[:2] == pytest.approx([exact[0]] * 2) and late[2] == pytest.approx(exact[1])
        for name, truth in ((device.SYNC, late), (device.DELAYED, exact)):
            entrant = offload.Entrant(
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
                {(late, KIND): delayed, (early, KIND): overlap, (exact, "deepspeed"): 2.0 + overlap},
                {"fsdp2": "not today"},
            )
            for count, (delayed, overlap) in shares.items()
        }
        desk = Desk()
        offload.judge(desk, found)
        told = {key: (value.median, of) for key, (value, of) in desk.figures.items()}
        assert told == {
            "offload.delayed": (0.96, f"{late}, 32,768 tokens"),
            "offload.overlap": (0.93, f"{early}, 32,768 tokens"),
            "offload.deepspeed": (2.4, f"{exact}, 4,096 tokens"),
        }
        assert desk.refused == {"offload.fsdp2": "not today"}


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


@pytest.fixture(scope="module")
def trained() -> object:
    return training.Training(settings.Settings(rehearse=True))


@each("stage", zero.STAGES)
def test_a_stage_that_forgets_its_update_is_found(trained, stage: int) -> None:
    def build() -> Callable:
        model = zero.zk.shard(trained.model(), stage=stage)
        return trained.step(model, lambda: model.zero_grad())

    with pytest.raises(contest.WrongResult, match=r"lazy: the loss of step [234] is 5\.\d+, in fp32 it is"):
        trained.provider("lazy", build, 1.0).check()


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
