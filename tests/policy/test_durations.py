"""No test fails because another process had the core: a duration that must be short is the best of many tries.

`tries.best` measures until one is short enough; what must not hang has a patience, a moment and not a duration.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .tree import Finding, assert_clean, files, read

CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time_ns"}
INSTEAD = "a duration is compared from above; let best() of tests/comm/tries.py measure it"


def is_duration(node: ast.AST, named: set[str]) -> bool:
    """Whether a difference with a reading of a clock is in it, or a name that stands for one."""
    return any(
        (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and reads_clock(one))
        or (isinstance(one, ast.Name) and one.id in named)
        for one in ast.walk(node)
    )


def reads_clock(node: ast.AST) -> bool:
    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return any((func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")) in CLOCKS for func in calls)


def durations(source: str, path: str) -> Iterator[Finding]:
    for function in ast.walk(ast.parse(source)) if any(clock in source for clock in CLOCKS) else ():
        if not isinstance(function, ast.FunctionDef):
            continue
        named: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and is_duration(node.value, named):
                named |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                yield from (Finding(path, one.lineno, INSTEAD) for one in ast.walk(node.test) if is_above(one, named))


def is_above(node: ast.AST, named: set[str]) -> bool:
    """Whether it says of a duration that it is less than something."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    return any(
        is_duration(sides[place] if isinstance(op, ast.Lt | ast.LtE) else sides[place + 1], named)
        for place, op in enumerate(node.ops)
        if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    )


def test_no_duration_is_compared_from_above() -> None:
    assert_clean([one for path in files(".py", under=("tests/",)) for one in durations(read(path), path)])


def test_a_duration_that_is_compared_is_found() -> None:
    begun = "def test():\n    begun = time.monotonic()\n"
    for wrong in (
        "    assert time.monotonic() - begun < 3\n",
        "    took = (time.perf_counter() - begun) / 5\n    assert 3 >= took\n",
    ):
        assert [one.path for one in durations(begun + wrong, "a.py")] == ["a.py"]
    for right in (
        "    assert time.monotonic() - begun > 3\n",
        "    assert time.monotonic() < begun + 60\n",
        "    assert best(seconds, 3) < 3\n",
    ):
        assert not list(durations(begun + right, "a.py"))
