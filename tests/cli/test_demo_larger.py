"""The demo's fourth act: a model that does not fit trains from disk, with the losses that it has in memory."""

from __future__ import annotations

import doctest
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from zerokern.examples.demo import larger, plot
from zerokern.examples.demo.act import Act
from zerokern.examples.demo.results import Results
from zerokern.examples.demo.view import View
from zerokern.examples.model import Shape

ACT = Act(Shape(8, 384, 32), (), rows=2, steps=3, lr=1e-3, seconds=600.0, cap=160_000_000, ring_nbytes=4 << 20, stage=3)


def performed(act: Act) -> tuple[larger.Outcome | None, str]:
    stream = io.StringIO()
    return larger.perform(act, View(Console(file=stream, width=100))), stream.getvalue()


@pytest.mark.slow
def test_the_same_losses_under_a_cap(tmp_path: Path) -> None:
    outcome, said = performed(ACT)
    assert outcome is not None and not outcome.failed, said
    assert len(outcome.resting.losses) == ACT.steps
    assert outcome.resting.losses == outcome.resident.losses
    assert outcome.resting.taken < ACT.cap
    assert "the same bits" in said and "cap of 160 MB" in said
    assert plot.draw(tmp_path / "larger.png", Results(rested=outcome))
    # what rests on the disk was written in the step, and nothing of the other was
    assert min(outcome.resting.written) > 0.99 * larger.at_rest(ACT)
    assert outcome.resident.of_settled("written") == 0


@pytest.mark.slow
def test_a_cap_that_is_too_small_fails_by_name() -> None:
    outcome, said = performed(replace(ACT, cap=8_000_000))
    assert outcome is not None and outcome.failed
    assert "all on disk, capped: " in outcome.failure and "FAILED" in said


def test_full_and_quick_are_larger_than_their_caps() -> None:
    for act, times in ((larger.FULL, 2.8), (larger.QUICK, 1.4)):
        assert sum(larger.needs(act).values()) > times * act.cap
        assert larger.at_rest(act) == pytest.approx(12 * act.shape.numel, rel=1e-3)


def test_other_bits_are_a_failure() -> None:
    told = [larger.Told(losses=[5.0, 4.0, 3.0]), larger.Told(losses=[5.0, 4.0000001])]
    outcome = larger.Outcome(ACT, *told)
    assert (outcome.differs, outcome.failed) == (2, True)
    assert outcome.failure == "the losses of step 2 differ"
    assert not larger.Outcome(ACT, told[0], larger.Told(losses=[5.0])).failed


def test_without_room_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larger, "DISK_MARGIN", 1e12)
    outcome, said = performed(ACT)
    assert outcome is None and "left out" in said


def test_examples() -> None:
    assert doctest.testmod(larger).failed == 0
