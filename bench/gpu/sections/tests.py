"""`pytest -m gpu` on the installed package, in as many processes as pytest-xdist gives, else in one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ..report import Desk
from .commands import run_logged

# `python -m pytest` would put the folder it starts in before the installed package
PYTEST = "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main())"
PROCESSES = 6
COUNTED = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|deselected)\b")


def run(desk: Desk, out: Path) -> None:
    tree = desk.settings.tree
    if tree is None or not (tree / "tests").is_dir():
        desk.could_not("tests", f"there is no folder tests in {tree or 'a tree, which nobody named (--tree)'}")
        return
    chosen = tree / "tests" / ("core" if desk.settings.rehearse else "")
    words = ["-c", PYTEST, str(chosen), "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=10", "-rfE"]
    if importlib.util.find_spec("xdist") is not None and not desk.settings.rehearse:
        words += ["-n", str(PROCESSES), "--dist", "worksteal"]
    if desk.settings.rehearse:
        words += ["--collect-only"]
    log = out / f"{'rehearsal-' if desk.settings.rehearse else ''}pytest.log"
    code, lines = run_logged(words, log, desk.budget.left, cwd=tree)
    counts = counted(lines)
    desk.say(f"tests: {counts or (lines or ['no output'])[-1]}")
    desk.fact("tests", {"exit": code, "counts": counts})
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            desk.say(f"  {line[:300]}")
    if code is None:
        desk.could_not("tests", "stopped, late: the counts above are those of what had run")
    elif code not in (0, 5):  # 5: no test was collected
        desk.could_not("tests", f"pytest ended with {code}, see {log.name}")


def counted(lines: list[str]) -> dict[str, int]:
    """What pytest's last line counts.

    >>> counted(["...", "= 2 failed, 40 passed, 7 deselected in 3.21s ="])
    {'failed': 2, 'passed': 40, 'deselected': 7}
    """
    for line in reversed(lines):
        if found := COUNTED.findall(line):
            return {name: int(number) for number, name in found}
    return {}
