"""`pytest -m gpu` on the installed package, in as many processes as pytest-xdist gives, else in one.

Only files that have such tests are collected. What no kept result of this GPU has as passed comes first; then those
whose failure would make all figures worthless: kernels, then optimizers, then shards and collectives, then all others.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import machine, minutes, open_first
from ..report import Desk
from .commands import run_logged

# `python -m pytest` would put the folder it starts in before the installed package
PYTEST = "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main())"
PROCESSES = 8
FIRST = ("kernels", "cuda", "optim", "zero", "memory")
MARK = "mark.gpu"
COUNTED = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|deselected)\b")
LAST = re.compile(r" in \d[\d.]*s")
OUTCOME = re.compile(r"(?:^|\s)(PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?:\s|$)")
WORD = {"PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped", "XFAIL": "xfailed"}


def run(desk: Desk, out: Path) -> None:
    tree = desk.settings.tree
    if tree is None or not (tree / "tests").is_dir():
        desk.could_not("tests", f"there is no folder tests in {tree or 'a tree, which nobody named (--tree)'}")
        return
    files = chosen(tree / "tests")
    if desk.settings.rehearse:
        files = files[:1]
    before = out / f".{'rehearsal-' if desk.settings.rehearse else ''}passed.json"
    before.write_text(
        json.dumps(passed_before(minutes.kept(tree, desk.settings.pack), machine.gpu().get("name", ""))),
        encoding="utf-8",
    )
    plugin = ["-p", open_first.__name__, open_first.OPTION, str(before)]
    words = [
        "-c",
        PYTEST,
        *plugin,
        *map(str, files),
        "-m",
        "gpu",
        "-v",
        "-p",
        "no:cacheprovider",
        "--durations=10",
        "-rfE",
    ]
    if importlib.util.find_spec("xdist") is not None and not desk.settings.rehearse:
        # one test at a time to each process: they begin in the order of the files
        words += ["-n", str(PROCESSES), "--dist", "load", "--maxschedchunk", "1"]
    if desk.settings.rehearse:
        words += ["--collect-only", "-q"]
    log = out / f"{'rehearsal-' if desk.settings.rehearse else ''}pytest.log"
    code, lines = run_logged(words, log, desk.budget.left, cwd=tree)
    before.unlink()
    counts = counted(lines)
    desk.say(f"tests: {counts or (lines or ['no output'])[-1]}")
    desk.fact("tests", {"exit": code, "counts": counts, "files": [file.name for file in files]})
    if not desk.settings.rehearse:
        desk.fact("tests: passed", passed(lines))
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            desk.say(f"  {line[:300]}")
    if code is None:
        desk.could_not("tests", "stopped, late: the counts above are those of what had run")
    elif code not in (0, 5):  # 5: no test was collected
        desk.could_not("tests", f"pytest ended with {code}, see {log.name}")


def chosen(tests: Path) -> list[Path]:
    """The files that have tests for a GPU, in order of value: to collect all others would take most of a minute."""
    files = [file for file in sorted(tests.rglob("test_*.py")) if MARK in file.read_text(encoding="utf-8")]

    def value(file: Path) -> int:
        folder = file.relative_to(tests).parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    return sorted(files, key=value)


def counted(lines: list[str]) -> dict[str, int]:
    """What pytest's last line counts; where it had no time for one, what its lines of single tests say.

    >>> counted(["...", "= 2 failed, 40 passed, 7 deselected in 3.21s ="])
    {'failed': 2, 'passed': 40, 'deselected': 7}
    >>> counted(["[gw0] [  3%] PASSED a.py::test_x", "[gw1] [  6%] FAILED a.py::test_y", "[gw0] [  9%] PASSED a.py::z"])
    {'passed': 2, 'failed': 1}
    """
    for line in reversed(lines):
        if LAST.search(line) and (found := COUNTED.findall(line)):
            return {name: int(number) for number, name in found}
    told = Counter(WORD[match[1]] for line in lines if "::" in line and (match := OUTCOME.search(line)))
    return dict(told)


def passed(lines: list[str]) -> list[str]:
    """The tests that passed, by pytest's names, as one process says it or several.

    >>> passed(["[gw0] [  3%] PASSED a.py::test_x[1 b]", "a.py::test_y PASSED [ 6%]", "a.py::test_z FAILED [ 9%]"])
    ['a.py::test_x[1 b]', 'a.py::test_y']
    """
    told = (line.partition(" PASSED")[::2] for line in lines if "::" in line and " PASSED" in line)
    return sorted(after.strip() if "::" in after else before.strip() for before, after in told)


def passed_before(results: Mapping[str, Mapping[str, Any]], gpu: str) -> list[str]:
    """What the kept results of this GPU have as passed."""
    facts = [
        fact
        for content in results.values()
        for fact in content["facts"]
        if content["machine"]["gpu"].get("name") == gpu and fact["name"] == "tests: passed"
    ]
    return sorted({name for fact in facts for name in fact["found"]})
