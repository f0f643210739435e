"""Public names: each means one thing, and each shows how it is used, with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
from pathlib import Path
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


def with_examples() -> list[str]:
    """Modules whose text has examples. It is read, not imported: whoever collects tests needs no framework."""
    root = Path(zerokern.__path__[0])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = ".".join((zerokern.__name__, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if ">>>" in path.read_text() and not path.name.startswith(("test_", "conftest", "__main__")):
            found.append(name)
    return found


def examples(name: str) -> list[doctest.DocTest]:
    """Those of the docstrings that the module defines; none where it needs an optional library that is not here."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        return []
    scope = {"torch": torch, "zk": zerokern}
    return doctest.DocTestFinder(exclude_empty=True).find(module, globs={**vars(module), **scope})


@pytest.mark.parametrize("module", public_modules(), ids=lambda module: module.__name__)
def test_no_name_is_overshadowed_and_every_one_has_an_example(module: ModuleType) -> None:
    before = {name: getattr(module, name) for name in module.__all__}
    import_everything(zerokern)
    assert overshadowed(module) == [] and without_example(module) == []
    assert [name for name, value in before.items() if getattr(module, name) is not value] == []


@pytest.mark.parametrize("module", with_examples())
def test_examples_run(module: str) -> None:
    heard: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    failed = sum(runner.run(example, out=heard.append).failed for example in examples(module))
    assert failed == 0, "".join(heard)


def pasted() -> dict[str, str]:
    """The docstrings of public names, and of the public methods and properties of classes, by name."""
    found = {}
    for space, module in {"zk": zerokern, "zk.kernels": zerokern.kernels, "zk.io": zerokern.io}.items():
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                found[f"{space}.{name}"] = value.__doc__ or ""
            for member in dir(value) if inspect.isclass(value) else ():
                owner = next((kind for kind in value.__mro__ if member in vars(kind)), object)
                if owner.__module__.startswith("zerokern.") and member[0] != "_":
                    found[f"{space}.{name}.{member}"] = getattr(inspect.getattr_static(value, member), "__doc__", "")
    return {name: text for name, text in found.items() if text and ">>>" in text}


def unpasteable(examples: dict[str, str]) -> dict[str, str]:
    """What examples print that do not run as a user pastes them, who has imported torch and zerokern as zk."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    failed = {}
    for name, text in examples.items():
        heard: list[str] = []
        scope = {"torch": torch, "zk": zerokern, "__name__": "__main__"}
        if runner.run(doctest.DocTestParser().get_doctest(text, scope, name, None, 0), out=heard.append).failed:
            failed[name] = "".join(heard)
    return failed


def test_an_example_of_a_public_name_runs_when_it_is_pasted() -> None:
    """It says zk.AdamW and not AdamW, which only its own module knows. Cached properties, which doctest does not find,
    are among these."""
    examples = pasted()
    assert {"zk.AdamW", "zk.AdamW.step", "zk.Plan.pinned", "zk.kernels.adam", "zk.io.Store"} <= examples.keys()
    assert unpasteable(examples) == {}
    assert list(unpasteable({"x": ">>> AdamW([torch.ones(1)])"})) == ["x"]


def test_one_version_number() -> None:
    (declared,) = re.findall(r'^version = "(.+)"', read("pyproject.toml"), flags=re.MULTILINE)
    assert importlib.metadata.version("zerokern") == zerokern.__version__ == declared
    assert f"## [{declared}] - " in read("CHANGELOG.md")


def test_a_bad_name_is_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "shady").mkdir()
    (tmp_path / "shady" / "adam.py").write_text("")
    (tmp_path / "shady" / "__init__.py").write_text("__all__ = ['adam']\ndef adam():\n    'No example.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    shady = importlib.import_module("shady")
    assert overshadowed(shady) == ["adam"]
    assert without_example(shady) == ["adam"]
