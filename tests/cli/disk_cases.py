"""What the tests of the disk benchmark share."""

from __future__ import annotations

from importlib import import_module

contest, pattern, workfile = (
    import_module(f"zerokern.bench.disk.{name}") for name in ("contest", "pattern", "workfile")
)
MIB = 1 << 20
READ, WRITE, MIXED, *RANDOM = PATTERNS = pattern.patterns(smoke=True)


def task(file, wanted=READ, **more):
    values = {"trial_nbytes": MIB, "tune": False, "say": lambda text: None, **more}
    return contest.Task(wanted, file, **values)
