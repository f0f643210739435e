"""The table of mutants in tests/README.md, made of what the runs before and after a change of the tests have found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from all_mutants import MUTANTS
from mutant import ROOT

__all__ = ["BASELINE", "RESULTS", "lines", "load", "write"]

HERE = Path(__file__).parent
BASELINE, RESULTS = HERE / "baseline.json", HERE / "results.json"
README = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- made by tests/mutants/run.py -->", "<!-- end of what tests/mutants/run.py makes -->"
LANES = ("quick", "slow", "survived")

Verdicts = Mapping[str, Mapping[str, Any]]


def load(path: Path) -> Verdicts:
    """Verdicts by the name of the mutant; none where nothing has run yet."""
    return json.loads(path.read_text()) if path.exists() else {}


def lines(before: Verdicts, after: Verdicts) -> list[str]:
    """How many were found, and a row for each mutant."""
    made = ["| | quick lane | slow lane | survived |", "| --- | --- | --- | --- |"]
    for name, some in (("before", before), ("now", after)):
        count = Counter(some[one.name]["lane"] for one in MUTANTS if one.name in some)
        made.append(f"| {name} | {' | '.join(str(count[lane]) for lane in LANES)} |")
    made += ["", "| mutant | what is wrong | before | now | found by | s |", "| --- | --- | --- | --- | --- | --- |"]
    for one in MUTANTS:
        was, found = before.get(one.name, {}), after.get(one.name, {})
        by = found.get("by", "").removeprefix("tests/").partition("[")[0]
        cells = (one.area, one.name.replace("_", " "), one.says, was.get("lane", ""), found.get("lane", ""), by)
        made.append(f"| {cells[0]}: {' | '.join(cells[1:])} | {found.get('seconds', '')} |")
    return made


def made_of(text: str, before: Verdicts, after: Verdicts) -> str:
    """The page with the table as it should be."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([f"{head}{BEGIN}", "", *lines(before, after), "", f"{END}{tail}"])


def write() -> None:
    """Renews the table."""
    README.write_text(made_of(README.read_text(), load(BASELINE), load(RESULTS)))
