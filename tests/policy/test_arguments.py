"""A docstring that tells arguments under `Args:` tells all of them, in the order in which a call is read."""

from __future__ import annotations

import inspect
import re
from typing import Any

from .options import public_callables

SECTION = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


def told(docstring: str) -> list[str]:
    """The names under `Args:`."""
    section = SECTION.search(inspect.cleandoc(docstring) + "\n")
    return [name for entry in ENTRY.findall(section[1]) for name in entry.split(", ")] if section else []


def is_ours(function: Any) -> bool:
    return function.__module__.partition(".")[0] == "zerokern"


def names(function: Any) -> list[str]:
    """Of a call's arguments, but for those that are handed on unnamed."""
    handed_on = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind not in handed_on and one.name != "self"]


def callables() -> dict[str, Any]:
    """Public functions and classes, and the methods of these, whose docstrings have such a section."""
    found = list(public_callables())
    for name, value in found[:]:
        if inspect.isclass(value):
            methods = inspect.getmembers(value, lambda one: inspect.isfunction(one) and is_ours(one))
            found += [(f"{name}.{key}", method) for key, method in methods if not key.startswith("_")]
    return {name: value for name, value in found if "Args:" in (value.__doc__ or "")}


def test_all_arguments_are_told_in_order() -> None:
    found = callables()
    assert {name for name, value in found.items() if told(value.__doc__) != names(value)} == set()
    looked_at = ("export", "load", "load_pretrained", "plan", "save", "shard")
    assert set(found) >= {f"zerokern.{name}" for name in looked_at}


def test_names_are_found() -> None:
    def example() -> None:
        """What it does.

        Args:
            one: what it is, and in a second line
                two: no argument.
            three, four: both.

        >>> other: 1
        """

    assert told(example.__doc__ or "") == ["one", "three", "four"]
