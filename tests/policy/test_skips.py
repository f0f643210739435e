"""Each reason to skip that a test gives is one that tests/skips.txt allows it; each row there is for tests that are."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase

import pytest

from .tree import Finding, assert_clean, dotted, files, read

LIST = "tests/skips.txt"
GIVES: dict[str, int | str] = {
    "pytest.skip": 0, **dict.fromkeys(("pytest.importorskip", "pytest.mark.skipif", "pytest.mark.skip"), "reason"),
}  # fmt: skip
ANY = "anything"  # stands for what an f-string fills in; rows for those end in a wildcard


def said(node: ast.expr) -> str | None:
    """The text of a literal; None for what only a run can tell."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
    return None


def reasons(source: str) -> list[tuple[int, str]]:
    """Line and text of every reason to skip that a source spells out."""
    found = []
    for node in ast.walk(ast.parse(source)) if "skip" in source else ():
        place = GIVES.get(dotted(node.func)) if isinstance(node, ast.Call) else None
        if place is None:
            continue
        given = node.args[:1] if place == 0 else [word.value for word in node.keywords if word.arg == place]
        found += [(node.lineno, text) for one in given if (text := said(one)) is not None]
    return found


def unlisted(path: str, source: str, allowed: list[tuple[str, str]]) -> list[Finding]:
    return [
        Finding(path, line, f"skips because it {reason!r}, which no row of {LIST} allows")
        for line, reason in reasons(source)
        if not any(fnmatchcase(f"{path}::{ANY}", tests) and fnmatchcase(reason, why) for tests, why in allowed)
    ]


@pytest.fixture
def allowed(pytestconfig: pytest.Config) -> list[tuple[str, str]]:
    """The rows as this run's own account of skips has read them."""
    account = pytestconfig.pluginmanager.get_plugin("skip-account")
    assert account is not None
    return account.allowed


def test_every_reason_is_listed(allowed: list[tuple[str, str]]) -> None:
    paths = [path for path in files(".py", under=("tests/",)) if path.rpartition("/")[2].startswith("test_")]
    own = ("tests/policy/test_skips.py", "tests/policy/test_harness.py")
    assert_clean([one for path in paths if path not in own for one in unlisted(path, read(path), allowed)])


def test_every_row_is_for_tests_that_are(allowed: list[tuple[str, str]]) -> None:
    paths = files(".py", under=("tests/",))
    rows = [tests for tests, _ in allowed]
    assert [tests for tests in rows if not any(fnmatchcase(f"{path}::{ANY}", tests) for path in paths)] == []


def test_what_is_not_listed_is_found() -> None:
    source = 'import pytest\npytest.skip(f"needs {tool}")\npytest.importorskip("triton", reason="needs triton")\n'
    found = unlisted("tests/test_new.py", source, [("tests/*", "needs triton"), ("tests/test_new.py", "needs *")])
    assert [one.line for one in found] == [2], "a row that names a file, and no test of it, is for nothing"
