"""Public names: each means one thing, and each shows how it is used, with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from types import ModuleType

import pytest
import torch

import zerokern

from .options import public_modules
from .test_verbs import OPTIONAL
from .tree import read


def import_everything(package: ModuleType) -> None:
    """Imports every submodule: only then does a module bind its name in its package, over a function of that name.

    A file that needs an optional library which is not here is left out."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        if found.name.rpartition(".")[2] in ("__main__", "conftest") or ".test_" in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise


def overshadowed(module: ModuleType) -> list[str]:
    """Public names of callables that a submodule of the same name would replace."""
    submodules = {found.name for found in pkgutil.iter_modules(module.__path__)}
    public = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    replaced = [name for name in public if name in submodules]
    meant = [name for name in module.__all__ if name in submodules and name not in public]
    return replaced + [name for name in meant if getattr(module, name).__name__ != f"{module.__name__}.{name}"]


def without_example(module: ModuleType) -> list[str]:
    values = {name: getattr(module, name) for name in module.__all__}
    shown = {name: value for name, value in values.items() if callable(value)}
    return [name for name, value in shown.items() if ">>>" not in (value.__doc__ or "")]


def examples() -> list[doctest.DocTest]:
    """The docstrings with examples of every module, each told once: by the module that defines it."""
    import_everything(zerokern)
    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "zerokern"]
    finder = doctest.DocTestFinder(exclude_empty=True)
    scope = {"torch": torch, "zk": zerokern}
    found = [test for module in modules for test in finder.find(module, globs={**vars(module), **scope})]
    return [test for test in found if test.examples]


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_no_name_is_overshadowed_and_every_one_has_an_example(module: ModuleType) -> None:
    before = {name: getattr(module, name) for name in module.__all__}
    import_everything(zerokern)
    assert overshadowed(module) == [] and without_example(module) == []
    assert [name for name, value in before.items() if getattr(module, name) is not value] == []


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example_runs(example: doctest.DocTest) -> None:
    heard: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.DocTestRunner(optionflags=flags, verbose=False).run(example, out=heard.append)
    assert result.failed == 0, "".join(heard)


def test_one_version_number() -> None:
    (declared,) = re.findall(r'^version = "(.+)"', read("pyproject.toml"), flags=re.MULTILINE)
    assert importlib.metadata.version("zerokern") == zerokern.__version__ == declared
    assert f"## {declared}" in read("CHANGELOG.md")


def test_a_bad_name_is_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "shady").mkdir()
    (tmp_path / "shady" / "adam.py").write_text("")
    (tmp_path / "shady" / "__init__.py").write_text("__all__ = ['adam']\ndef adam():\n    'No example.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    shady = importlib.import_module("shady")
    assert overshadowed(shady) == ["adam"]
    assert without_example(shady) == ["adam"]
