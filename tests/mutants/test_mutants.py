"""Mutants can be put into the code as it is, the tests that should find them exist, and the last run found them."""

from __future__ import annotations

from collections import Counter

import pytest
import report
from all_mutants import MUTANTS
from mutant import ROOT, Mutant, mutated

FEWEST = {
    "kernels": 8, "comm": 6, "memory": 5, "io": 7, "zero": 14, "optim": 40, "schedule": 6, "checkpoint": 7,
    "activations": 1, "interop": 1, "parallel": 1, "planner": 8,
}  # fmt: skip


@pytest.mark.parametrize("area", FEWEST)
def test_every_mutant_can_be_made(area: str) -> None:
    assert {one.area for one in MUTANTS} == set(FEWEST)
    some = [one for one in MUTANTS if one.area == area]
    assert len(some) >= FEWEST[area]
    for one in some:
        text = mutated(one, (ROOT / one.file).read_text())
        if not one.is_native:
            compile(text, one.file, "exec")


def test_a_mutant_whose_text_is_gone_is_named() -> None:
    gone = Mutant("example", "zerokern/io/ticket.py", "a text that is not there", "", "", ())
    with pytest.raises(ValueError, match=r"mutant example: its text occurs 0 times in zerokern/io/ticket\.py"):
        mutated(gone, (ROOT / gone.file).read_text())


def test_names_differ_and_targets_exist() -> None:
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []
    targets = {target for one in MUTANTS for target in one.targets}
    assert sorted(target for target in targets if not is_there(target)) == []
    assert [one.name for one in MUTANTS if not one.targets] == []


def is_there(target: str) -> bool:
    file, *classes_and_test = target.split("::")
    path = ROOT / file
    return path.is_file() and (not classes_and_test or f"def {classes_and_test[-1]}(" in path.read_text())


def test_what_was_found_before_is_found_now_and_nine_of_ten_by_the_quick_lane() -> None:
    before, now = report.load(report.BASELINE), report.load(report.RESULTS)
    names = [one.name for one in MUTANTS]
    assert sorted(now) == sorted(names), "run tests/mutants/run.py --only for those that differ"
    lost = [name for name in names if now[name]["lane"] == "survived" != before.get(name, {}).get("lane", "survived")]
    assert lost == []
    assert 10 * sum(now[name]["lane"] == "quick" for name in names) >= 9 * len(names)


def test_the_page_has_the_table_of_the_last_run() -> None:
    page = report.README.read_text()
    assert page == report.made_of(page, report.load(report.BASELINE), report.load(report.RESULTS))
