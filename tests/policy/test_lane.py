"""`make test` is a lane with a budget: what it has room for is chosen, and a new suite costs an old row its place."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from .tree import ROOT, files, read

sys.path.insert(0, str(ROOT / "tests" / "lane"))
from choose import ALWAYS, RESULTS, with_new
from choosing import Row, choose, is_named
from lane import BUDGET_S, Lane, function_of

DO = "do: .venv/bin/python tests/lane/choose.py --new"


def functions(path: str) -> Iterator[str]:
    """The tests of a file but for those marked slow as a whole."""

    def within(body: list[ast.stmt], name: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_slow(node):
                if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                    yield from within(node.body, f"{name}::{node.name}")
                elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                    yield f"{name}::{node.name}"

    tree = ast.parse(read(path))
    if not any(isinstance(node, ast.Assign) and is_slow(node) for node in tree.body):
        yield from within(tree.body, path)


def is_slow(node: ast.FunctionDef | ast.ClassDef | ast.Assign) -> bool:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "pytestmark" and "mark.slow" in ast.unparse(node.value)
    return any(ast.unparse(one) == "pytest.mark.slow" for one in node.decorator_list)


def test_the_lane_keeps_its_budget() -> None:
    assert Lane.load().seconds <= BUDGET_S, DO


def test_every_test_is_known() -> None:
    known = Lane.load().known
    found = {name for path in files(".py", under=("tests/",)) if "/test_" in path for name in functions(path)}
    assert sorted(found - known.keys()) == [], DO
    gone = {name for name in known if f"{name.rpartition('::')[2]}" not in read(name.partition("::")[0])}
    assert sorted(gone) == [], DO


def test_what_runs_was_chosen(request: pytest.FixtureRequest) -> None:
    """All rows of a test run if its rows have changed, or one is gone that was chosen: seconds that nobody counts."""
    if request.config.getoption("--lane"):
        lane, there = Lane.load(), {item.nodeid for item in request.session.items}
        count = Counter(map(function_of, there))
        changed = [
            function
            for function, known in lane.known.items()
            if count[function] > known or (count[function] == known and not lane.rows.get(function, {}).keys() <= there)
        ]
        assert changed == [], DO


def test_what_finds_a_mutant_is_in_the_lane() -> None:
    lane = Lane.load()
    mutants = json.loads(RESULTS.read_text())
    left_out = {name: one["by"] for name, one in mutants.items() if one["lane"] == "quick" and not lane.has(one["by"])}
    assert left_out == {}, DO
    tests = [name for rows in lane.rows.values() for name in rows]
    assert [one for one in ALWAYS if not any(is_named(test, one) for test in tests)] == []


def test_each_folder_of_tests_is_in_the_lane() -> None:
    lane = Lane.load()
    folders = {name.split("/")[1] for name in lane.known}
    assert folders - {name.split("/")[1] for name in lane.rows} == set()


def test_what_enters_most_for_its_seconds_is_chosen_first() -> None:
    rows = [
        Row("tests/a.py::test_all", 10.0, frozenset(range(12))),
        Row("tests/a.py::test_half", 1.0, frozenset(range(6))),
        Row("tests/a.py::test_other_half[1]", 1.0, frozenset(range(6, 11))),
        Row("tests/a.py::test_cheap", 0.1, frozenset()),
        Row("tests/a.py::test_must", 2.0, frozenset({1})),
    ]
    chosen = choose(rows, ["tests/a.py::test_must"], budget_s=5.0)
    assert list(chosen.gains.items()) == [
        ("tests/a.py::test_must", 1),
        ("tests/a.py::test_half", 5),
        ("tests/a.py::test_other_half[1]", 5),
        ("tests/a.py::test_cheap", 0),
    ]
    assert chosen.seconds == pytest.approx(4.1)
    assert "tests/a.py::test_all" in choose(rows, [], budget_s=15.0).gains  # the only one to enter the last block


def test_a_new_test_costs_an_old_one_its_place() -> None:
    lane = Lane()
    old = {f"tests/a/x.py::test_{gain}": (BUDGET_S / 4, gain) for gain in (1, 2, 3, 4)}
    lane.put(old, list(old))
    assert lane.left_out(old) == set()
    new = [
        Row("tests/b/x.py::test_new", 1.0, frozenset({1})),
        Row("tests/b/x.py::test_long", BUDGET_S / 8, frozenset({2})),
    ]
    names = [row.name for row in new]
    assert with_new(lane, new, names, ["tests/a/x.py::test_1"]) == ["tests/a/x.py::test_2"]
    assert lane.left_out([*old, *names]) == {"tests/a/x.py::test_2", "tests/b/x.py::test_long"}


def test_rows_that_are_not_known_run() -> None:
    lane = Lane()
    lane.put({"tests/a.py::test[1]": (0.5, 3)}, ["tests/a.py::test[1]", "tests/a.py::test[2]"])
    assert lane.left_out(["tests/a.py::test[1]", "tests/a.py::test[2]"]) == {"tests/a.py::test[2]"}
    assert lane.left_out(["tests/a.py::test[1]", "tests/a.py::test[2]", "tests/a.py::test[3]"]) == set()
    assert lane.left_out(["tests/a.py::test[2]", "tests/a.py::test[3]"]) == set()
    assert lane.left_out(["tests/a.py::test_new"]) == set()
