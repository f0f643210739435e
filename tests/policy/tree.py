"""The repository as the policies see it: its files, its Python sources, its commands."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNTRACKED = ("build", "dist", "lib", "__pycache__", ".git", ".venv", "_cache")
BESIDE = ("bench", "examples")  # folders beside the package that are installed within it
BINARY = (".png", ".so", ".pyc", ".whl")


@dataclass(frozen=True)
class Finding:
    """One breach of a policy: where it is, and what to do instead."""

    path: str
    line: int
    says: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.says}"


def assert_clean(findings: list[Finding]) -> None:
    assert not findings, "\n" + "\n".join(str(finding) for finding in findings)


@lru_cache(maxsize=1)
def tracked() -> tuple[str, ...]:
    """Every file of the repository, as git sees it: committed, or new and not ignored. A copy without git is walked."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode == 0:
        paths = set(listed.stdout.decode().split("\0"))
    else:
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        paths = {path.as_posix() for path in found if not any(part.endswith(UNTRACKED) for part in path.parts)}
    return tuple(sorted(path for path in paths if path and (ROOT / path).is_file()))


def files(*suffixes: str, under: tuple[str, ...] = ("",)) -> list[str]:
    return [path for path in tracked() if path.endswith(suffixes) and path.startswith(under)]


def texts() -> list[str]:
    """Every tracked file that a person can read."""
    return [path for path in tracked() if not path.endswith(BINARY)]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def module_name(path: str) -> str:
    """zerokern/kernels/ops.py is zerokern.kernels.ops; bench/ops/adam.py is zerokern.bench.ops.adam, as installed."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"zerokern.{name}" if name.split(".")[0] in BESIDE else name


def is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a source of the library, which several policies look at."""
    return tuple(ast.walk(ast.parse(source)))


@dataclass(frozen=True)
class Import:
    """One imported name: `from torch import nn as n` has module "torch", name "nn", alias "n"."""

    module: str
    name: str
    alias: str
    line: int
    at_module_level: bool

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@cache
def imports(source: str, module: str, package: bool) -> tuple[Import, ...]:
    """Every import of a source, relative ones resolved against `module`."""
    found = []
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while todo:
        node, top = todo.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found.append(Import(alias.name, "", bound, node.lineno, top))
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node, module, package)
            found += [Import(base, a.name, a.asname or a.name, node.lineno, top) for a in node.names]
        elif not isinstance(node, ast.expr):
            inside = isinstance(node, FUNCTIONS)
            todo += [(child, top and not inside) for child in ast.iter_child_nodes(node)]
    return tuple(sorted(found, key=lambda one: one.line))


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def resolve(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if package else 0)]
    return ".".join(kept + ([node.module] if node.module else []))


def dotted(node: ast.expr) -> str:
    """The text of a name such as `torch.cuda.Stream`, or "" for anything that is no plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.MULTILINE))
