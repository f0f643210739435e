"""The section `zero` of `bench/gpu.sh`: who trains wrongly is not timed, and the slowest stage is what is told of."""

from __future__ import annotations

import doctest
import json
import math
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

clock, contest, plain, report, run, section, settings, timers, training = (
    import_module(f"zerokern.bench.{name}")
    for name in (
        "gpu.clock", "contest", "gpu.peers.plain_training", "gpu.report", "run", "gpu.sections.zero", "gpu.settings",
        "timers", "gpu.training",
    )
)  # fmt: skip
TOY = settings.Settings(rehearse=True)
NAMES = [section.name_of(stage, "no process group") for stage in section.STAGES]


@pytest.fixture(scope="module")
def course() -> object:
    return training.Training(TOY)


@pytest.mark.slow
def test_the_section_is_rehearsed(tmp_path: Path) -> None:
    # in a process of its own: sections are forks, and one of this process, which has OpenMP threads, would wait for
    # threads that a fork does not have
    program = "import sys; from zerokern.bench.gpu.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--rehearse", str(tmp_path), "zero"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "rehearsal-zero.json").read_text())
    (about,) = found["contests"]
    assert about["missing"] == {}
    assert [row["name"] for row in found["rows"] if not row["peer"]][:4] == NAMES
    assert sum(not row["peer"] for row in found["rows"]) == 8
    assert found["figures"].keys() == {"zero.overhead", "zero.reserved"}


def test_the_fp32_truth_falls(course) -> None:
    assert course.truth[-1] < course.truth[0] * (1 - 2 * training.TOLERANCE)


@pytest.mark.parametrize("stage", section.STAGES)
def test_a_stage_that_forgets_its_update_is_found(course, stage: int) -> None:
    def build() -> Callable:
        model = section.zk.shard(course.model(), stage=stage)
        return course.step(model, lambda: model.zero_grad())

    with pytest.raises(contest.WrongResult, match=r"lazy: the loss of step [234] is 5\.\d+, in fp32 it is"):
        course.provider("lazy", build, 1.0).check()


def test_everyone_begins_alike_and_the_dice_are_kept(course) -> None:
    before = torch.get_rng_state()
    wide, narrow = course.model(torch.float32), course.model()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b.float()) for a, b in zip(wide.parameters(), narrow.parameters(), strict=True))


class Desk:
    """Notes what it is told."""

    settings = settings.Settings(rehearse=False)

    def __init__(self) -> None:
        self.figures, self.facts, self.refused = {}, {}, {}

    def figure(self, key: str, value: object, of: str = "") -> None:
        self.figures[key] = (value, of)

    def fact(self, name: str, value: object) -> None:
        self.facts[name] = value

    def could_not(self, key: str, why: str) -> None:
        self.refused[key] = why


def outcome_of(ratios: dict[str, float], missing: dict[str, str] | None = None) -> object:
    one = timers.Estimate(1.0, 1.0, 1.0)
    rows = [
        run.Row(name, one, 1.0, 1, "", math.nan, {plain.OURS: timers.Estimate(ratio, ratio - 0.01, ratio + 0.01)})
        for name, ratio in ratios.items()
    ]
    return run.Outcome("step", rows, {plain.OURS: {"wiring": "plain parameters"}}, missing or {}, "", {})


def test_the_slowest_stage_is_told_of() -> None:
    desk = Desk()
    section._judge(desk, outcome_of(dict(zip(NAMES, (1.0, 0.99, 0.8, 1.1), strict=True))), NAMES)
    value, of = desk.figures["zero.overhead"]
    assert value.median == pytest.approx(25.0) and value.low < 25.0 < value.high
    assert of == f"{NAMES[2]}, vs zk.AdamW on plain parameters"
    assert desk.facts == {
        "zero: overhead in % of the step, vs zk.AdamW": dict(zip(NAMES, (0.0, 1.01, 25.0, -9.09), strict=True))
    }


def test_without_one_stage_there_is_no_figure() -> None:
    desk = Desk()
    section._judge(desk, outcome_of({NAMES[0]: 1.0}, {NAMES[1]: "its result is wrong"}), NAMES[:2])
    assert desk.figures == {}
    assert desk.refused == {"zero.overhead": f"{NAMES[1]}: its result is wrong"}


def test_examples() -> None:
    assert doctest.testmod(section).attempted == 1
    assert doctest.testmod(section).failed == 0
