"""`pytest -m gpu` on the installed package, in as many processes as pytest-xdist gives, else in one.

Only files that have such tests are collected, and those whose failure would make all figures worthless come first:
kernels, then optimizers, then shards and collectives, then all others.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

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
    words = ["-c", PYTEST, *map(str, files), "-m", "gpu", "-v", "-p", "no:cacheprovider", "--durations=10", "-rfE"]
    if importlib.util.find_spec("xdist") is not None and not desk.settings.rehearse:
        # one test at a time to each process: they begin in the order of the files
        words += ["-n", str(PROCESSES), "--dist", "load", "--maxschedchunk", "1"]
    if desk.settings.rehearse:
        words += ["--collect-only", "-q"]
    log = out / f"{'rehearsal-' if desk.settings.rehearse else ''}pytest.log"
    code, lines = run_logged(words, log, desk.budget.left, cwd=tree)
    counts = counted(lines)
    desk.say(f"tests: {counts or (lines or ['no output'])[-1]}")
    desk.fact("tests", {"exit": code, "counts": counts, "files": [file.name for file in files]})
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
