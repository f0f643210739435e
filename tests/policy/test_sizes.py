"""A source file holds one concept and has at most 600 lines: a concept is not spread over files to stay below a cap."""

from __future__ import annotations

import statistics

import pytest

from .tree import files, read

MOST = 600
MEDIAN = 200
SUFFIXES = (".py", ".cpp", ".h", ".def")


def too_long(lengths: dict[str, int]) -> list[str]:
    return [f"{path} has {count} lines, at most {MOST}: split it" for path, count in lengths.items() if count > MOST]


def test_no_source_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {path: len(read(path).splitlines()) for path in files(*SUFFIXES)}
    middle = statistics.median(count for count in lengths.values() if count)
    with capsys.disabled():
        print(f" {len(lengths)} sources, median {middle:.0f} lines, longest {max(lengths.values())} ", end="")
    assert too_long(lengths) == []
    assert middle <= MEDIAN, f"the median source has {middle} lines; {MEDIAN} at most"


def test_a_long_source_is_found() -> None:
    assert too_long({"a.py": MOST, "b.py": MOST + 1}) == [f"b.py has {MOST + 1} lines, at most {MOST}: split it"]
