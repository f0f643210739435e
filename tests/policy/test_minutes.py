"""How long the tests take is said in several places, and means the same in all of them: what the Makefile says."""

from __future__ import annotations

import re

import pytest

from .tree import read

PAGES = ("CONTRIBUTING.md", "tests/README.md")
SAID = re.compile(r"make (test(?:-\w+)?)\b(?:(?!make test).)*?at most (\d+) minutes", re.DOTALL)


def allowed(makefile: str) -> dict[str, int]:
    found = re.findall(r"^(test(?:-\w+)?):.*at most (\d+) minutes", makefile, re.MULTILINE)
    return {target: int(minutes) for target, minutes in found}


def said(page: str) -> dict[str, int]:
    """What a page says of each target that it names together with its minutes."""
    return {target: int(minutes) for target, minutes in SAID.findall(page.replace("`", ""))}


def test_the_targets_are_those_of_the_tests() -> None:
    assert set(allowed(read("Makefile"))) == {"test", "test-rest", "test-all"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_the_minutes_of_the_makefile(page: str) -> None:
    assert said(read(page)) == allowed(read("Makefile"))


def test_other_minutes_are_seen() -> None:
    assert said("`make test`: quick, at most 5 minutes; `make test-rest` runs\nat most 9 minutes") == {
        "test": 5,
        "test-rest": 9,
    }
    assert said("`make test` and `make test-all`: at most 7 minutes") == {"test-all": 7}
