"""tests/lane.json: the tests that `make test` runs, their CPU seconds, and those that it leaves to `make test-rest`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["BUDGET_S", "PATH", "Lane", "function_of", "is_drawn"]

PATH = Path(__file__).parent.parent / "lane.json"
BUDGET_S = 360.0  # of 400: the rest starts two workers and collects


def function_of(name: str) -> str:
    """A test without its row.

    >>> function_of("tests/a.py::test_b[1-x]")
    'tests/a.py::test_b'
    """
    return name.partition("[")[0]


def is_drawn(name: str, config: Any, share: float = 0.5) -> bool:
    """Whether a run takes this slow row of a long product: a share of them, which `--seed` draws, so that other ones
    run with the next commit. `--seed every` takes each."""
    seed = config.getoption("--seed")
    return seed == "every" or zlib.crc32(f"{seed} {name}".encode()) < share * 2**32


@dataclass
class Lane:
    """`rows`: for each function its rows of the lane, with their CPU seconds and how many blocks of the library each
    was the first to enter when it was chosen. `known`: how many quick rows each function had then; of a function
    that has other ones now, and of one that is not known, all rows run.
    """

    rows: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(seconds for rows in self.rows.values() for seconds, _ in rows.values())

    def left_out(self, quick: Iterable[str]) -> set[str]:
        """Of the quick tests that there are, those that the lane has no place for."""
        families: dict[str, list[str]] = {}
        for name in quick:
            families.setdefault(function_of(name), []).append(name)
        return {
            name
            for function, names in families.items()
            if self.known.get(function) == len(names) and self.rows.get(function, {}).keys() <= set(names)
            for name in names
            if name not in self.rows.get(function, {})
        }

    def needs(self, file: str) -> bool:
        """Whether any test of a file may be in the lane: a file that is not known may."""
        return file in self._files[0] or file not in self._files[1]

    @cached_property
    def _files(self) -> tuple[set[str], set[str]]:
        """Files with rows of the lane, and those that are known."""
        return {name.partition("::")[0] for name in self.rows}, {name.partition("::")[0] for name in self.known}

    def has(self, test: str) -> bool:
        """Whether this row runs, or any row if it is a function."""
        rows = self.rows.get(function_of(test), {})
        return test in rows if "[" in test else bool(rows)

    def save(self, path: Path = PATH) -> None:
        """A line a function, so that a change shows what it changes."""
        lines = []
        for function in sorted(self.known):
            said: dict[str, Any] = {"of": self.known[function]}
            if rows := self.rows.get(function):
                said["lane"] = {
                    name[len(function) :]: [int(100 * s) / 100, gain] for name, (s, gain) in sorted(rows.items())
                }
            lines.append(f"{json.dumps(function)}: {json.dumps(said)}")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: Path = PATH) -> Lane:
        if not path.exists():
            return cls()
        said: Mapping[str, Any] = json.loads(path.read_text())
        rows = {
            function: {f"{function}{row}": (s, gain) for row, (s, gain) in one["lane"].items()}
            for function, one in said.items()
            if "lane" in one
        }
        return cls(rows, {function: one["of"] for function, one in said.items()})

    def forget(self, functions: Iterable[str]) -> None:
        for function in set(functions):
            self.known.pop(function, None)
            self.rows.pop(function, None)

    def put(self, measured: Mapping[str, tuple[float, int]], names: Collection[str]) -> None:
        """What is known of the functions of `names`, all quick tests of theirs, of which `measured` are in the lane."""
        for function in {function_of(name) for name in names}:
            self.known[function] = sum(function_of(name) == function for name in names)
            self.rows.pop(function, None)
        for name, one in measured.items():
            self.rows.setdefault(function_of(name), {})[name] = one
