"""Chooses anew which tests `make test` runs: `.venv/bin/python tests/lane/choose.py [--new] [--jobs N]`.

All quick tests run once on a copy of the installed package that notes which of its blocks run, and their CPU seconds
are measured. Then `choosing.py` chooses, and tests/lane.json says what was chosen. With `--new` only functions run that
tests/lane.json does not know or that have other rows now; some come in, and what finds least for its seconds goes out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mutants"))

from choosing import Row, choose, is_named
from lane import BUDGET_S, Lane, function_of
from noting import noting_copy
from overlay import Tree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "tests" / "mutants" / "results.json"
NEW = 0.05  # of the budget, for new tests whose blocks nobody has compared with those of others
ALWAYS = ("tests/policy", "tests/mutants/test_mutants.py", "tests/core/test_machines.py")


PYTEST = "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main())"  # as the Makefile


def collected(*options: str) -> list[str]:
    """The names of all quick tests; of all tests with `--all`."""
    command = [sys.executable, "-c", PYTEST, "tests", "--collect-only", "-q", *options]
    said = subprocess.check_output(command, cwd=ROOT, text=True)
    return [line for line in said.splitlines() if line.startswith("tests/") and "::" in line]


def measured(names: Sequence[str], folder: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Runs these tests in so many processes at a time, each on a copy of its own."""
    tree = Tree(ROOT)
    files = sorted({name.partition("::")[0] for name in names})
    running = []
    for job in range(jobs):
        copy = noting_copy(tree, folder / str(job))
        wanted = [name for name in names if name.partition("::")[0] in set(files[job::jobs])]
        (copy / "wanted.json").write_text(json.dumps(wanted))
        env = {**os.environ, "PYTHONPATH": f"{copy}:{HERE}", "ZK_LANE_FOLDER": str(copy)}
        command = [sys.executable, "-c", PYTEST, *files[job::jobs], "-q", "-p", "measured", "-p", "no:cacheprovider"]
        with (copy / "said.txt").open("w") as said:
            running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT))
    for one in running:
        one.wait()
    found: dict[str, dict[str, Any]] = {}
    for job in range(jobs):
        copy = folder / str(job)
        if not (copy / "measured.json").exists():
            raise SystemExit(f"the tests could not run:\n{(copy / 'said.txt').read_text()[-3000:]}")
        found |= json.loads((copy / "measured.json").read_text())
    return found


def needed(mutants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What must run: what finds each mutant, and what must hold always."""
    return [*ALWAYS, *sorted({one["by"] for one in mutants.values() if one["lane"] == "quick"})]


def public(names: Sequence[str]) -> frozenset[int]:
    """The first block of each function that is public and of each public method of a public class."""
    import zerokern

    within = tuple(
        f"{one.__module__.removeprefix('zerokern.')}.{one.__qualname__}"
        for one in (getattr(zerokern, name) for name in zerokern.__all__)
        if hasattr(one, "__qualname__")
    )
    first = {name: number for number, name in reversed(list(enumerate(names)))}
    return frozenset(
        number
        for name, number in first.items()
        if name in within or (name.rpartition(".")[0] in within and not name.rpartition(".")[2].startswith("_"))
    )


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    return [Row(name, one["s"], frozenset(one["blocks"])) for name, one in found.items()]


def chosen_anew(rows: Sequence[Row], names: Collection[str], must: Sequence[str], first: frozenset[int]) -> Lane:
    lane, chosen = Lane(), choose(rows, must, BUDGET_S, first)
    seconds = {row.name: row.cost for row in rows}
    lane.put({name: (seconds[name], gain) for name, gain in chosen.gains.items()}, names)
    return lane


def with_new(lane: Lane, rows: Sequence[Row], names: Collection[str], must: Sequence[str]) -> list[str]:
    """Takes new rows in: what must run, and of the others those of most blocks for their seconds, as long as they stay
    within a small part of the budget. Returns the tests that had to go for them."""
    new = choose(rows, must, NEW * BUDGET_S).gains
    lane.put({row.name: (row.cost, len(row.blocks)) for row in rows if row.name in new}, names)
    gone = []
    of_folder = Counter(name.split("/")[1] for some in lane.rows.values() for name in some)
    old = [
        (gain / seconds, -seconds, name)
        for some in lane.rows.values()
        for name, (seconds, gain) in some.items()
        if name not in new and not any(is_named(name, one) for one in must)
    ]
    for _, _, name in sorted(old):
        if lane.seconds <= BUDGET_S:
            break
        if of_folder[name.split("/")[1]] == 1:  # each folder has its say
            continue
        of_folder[name.split("/")[1]] -= 1
        del lane.rows[function_of(name)][name]
        gone.append(name)
    return gone


def fails(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted(name for name, one in found.items() if one.get("outcome") == "failed")


def per_folder(lane: Lane) -> Iterable[str]:
    for folder in sorted({name.split("/")[1] for name in lane.known}):
        rows = [s for name, some in lane.rows.items() if name.split("/")[1] == folder for s, _ in some.values()]
        every = sum(count for name, count in lane.known.items() if name.split("/")[1] == folder)
        yield f"{folder:<14}{sum(rows):7.1f} s  {len(rows)} of {every} tests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="only the tests that tests/lane.json does not know")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes run tests")
    parser.add_argument("--folder", type=Path, default=None, help="for copies and measurements; kept if it is given")
    parser.add_argument("--measured", action="store_true", help="choose by what lies in --folder already")
    asked = parser.parse_args()
    names, lane, must = collected(), Lane.load(), needed(json.loads(RESULTS.read_text()))
    functions = {function_of(name) for name in collected("--all")}
    if asked.new:
        lane.forget(lane.known.keys() - functions)
        count = Counter(map(function_of, names))
        names = [name for name in names if lane.known.get(function_of(name)) != count[function_of(name)]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        found = kept(folder) if asked.measured else measured(names, folder, asked.jobs) if names else {}
        blocks = json.loads((folder / "0" / "names.json").read_text()) if names else []
    for name in fails(found):
        print(f"failed on the copy that notes: {name}")
    rows = rows_of(found)
    if asked.new:
        for name in with_new(lane, rows, names, must):
            print(f"goes to make test-rest: {name}")
    else:
        first = public(blocks)
        lane = chosen_anew(rows, names, must, first)
        every = frozenset().union(*(row.blocks for row in rows))
        entered = frozenset().union(*(row.blocks for row in rows if lane.has(row.name)))
        print(f"{len(entered)} of the {len(every)} blocks that quick tests enter, of {len(blocks)} in all")
        for number in sorted(first - entered):
            print(f"public, and entered by {'no quick test' if number not in every else 'none'}: {blocks[number]}")
    for function in functions - lane.known.keys():
        lane.known[function] = 0
    lane.save()
    print(*per_folder(lane), f"{lane.seconds:.0f} of {BUDGET_S:.0f} CPU seconds", sep="\n")


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/measured.json")):
        found |= json.loads(path.read_text())
    return found


if __name__ == "__main__":
    main()
