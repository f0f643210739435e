"""The programs: each a few lines, named after what sets it apart from the ordinary loop.

A program gets a `Run`. `@model` makes one of a model alone, `@loss(model)` one of a loss, both with the ordinary loop.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..training import Run, Training

KINDS = ("modules", "layers", "losses", "loops", "recomputing", "optimizers", "states", "issues")


@dataclasses.dataclass(frozen=True)
class Program:
    """`source` is what a reader should see, a function or a class; `issue` names a public report."""

    name: str
    kind: str
    follow: Callable[[Run], Any]
    source: Callable[..., Any]
    narrow: bool = False
    issue: str = ""

    @property
    def place(self) -> str:
        """File and line in this repository."""
        path = Path(inspect.getsourcefile(self.source) or "")
        return f"bench/right/programs/{path.name}#L{inspect.getsourcelines(self.source)[1]}"


PROGRAMS: dict[str, Program] = {}


def add(follow: Callable[[Run], Any], source: Callable[..., Any], narrow: bool = False, issue: str = "") -> None:
    name = source.__name__
    if not name.islower():  # a class
        name = "".join("_" * (at > 0 and char.isupper()) + char.lower() for at, char in enumerate(name))
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(name, source.__module__.rpartition(".")[2], follow, source, narrow, issue)


def program(*, narrow: bool = False, issue: str = "") -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    """Registers a function of a `Run`."""

    def register(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
        add(function, function, narrow, issue)
        return function

    return register


def model(*, issue: str = "", steps: int = 3, **recipe: Any) -> Callable[[Any], Any]:
    """Registers the ordinary loop over what a class or function makes."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        add(lambda run: run.loop(build, steps, **recipe), build, bool(recipe.get("narrow")), issue)
        return build

    return register


def loss(build: Callable[[], nn.Module], *, issue: str = "", steps: int = 3, **recipe: Any) -> Callable[[Any], Any]:
    """Registers the ordinary loop by a loss of (run, training, step)."""

    def register(function: Callable[[Run, Training, int], Tensor]) -> Callable[[Run, Training, int], Tensor]:
        def follow(run: Run) -> None:
            run.loop(build, steps, lambda training, step: function(run, training, step), **recipe)

        add(follow, function, bool(recipe.get("narrow")), issue)
        return function

    return register


for _kind in KINDS:
    importlib.import_module(f"{__name__}.{_kind}")
