"""An underscore name is its module's: no other module reads or writes it.

What is looked for are names that some file of the package defines, on objects that are not `self`. Names that torch has
as well are torch's; `_zk_` begins a mark of ours on somebody else's object.
"""

from __future__ import annotations

import ast
from functools import cache

import torch
from torch import nn

from .tree import Finding, assert_clean, files, imports, is_package, module_name, nodes, read

SOURCES = files(".py", under=("zerokern/",))
TORCHS = frozenset(dir(torch.Tensor)) | frozenset(dir(nn.Module())) | {"_is_param", "_schema", "_spec", "_timeout"}
WITHIN_IO = {"_crc", "_failure", "_slot", "_source", "_tensor"}  # of a ticket, which the files of zerokern/io share


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_") and not name.startswith("_zk_")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def defined(source: str) -> frozenset[str]:
    """Private names of a file and of its classes. Text that is a name may be one of `__slots__`."""
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return frozenset(filter(is_private, found))


def reaches(source: str, path: str, ours: frozenset[str]) -> list[Finding]:
    others, found = ours - defined(source) - TORCHS, []
    imported = imports(source, module_name(path), is_package(path))
    elsewhere = {one.alias for one in imported if one.module.split(".")[0] != "zerokern"}
    for one in imported:
        if one.module.split(".")[0] == "zerokern" and is_private(one.name):
            found.append(Finding(path, one.line, f"imports {one.name} of {one.module}; give it a public name there"))
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and node.attr in others and not is_self(node.value):
            if isinstance(node.value, ast.Name) and node.value.id in elsewhere:
                continue
            says = f"{ast.unparse(node)} is another module's; give what is needed a public name there"
            found.append(Finding(path, node.lineno, says))
    return found


def allowed(finding: Finding) -> bool:
    name = finding.says.split()[0].rpartition(".")[2]
    return finding.path.startswith("zerokern/io/") and name in WITHIN_IO


def test_no_module_reads_anothers_underscore_names() -> None:
    ours = frozenset().union(*(defined(read(path)) for path in SOURCES))
    found = [finding for path in SOURCES for finding in reaches(read(path), path, ours)]
    assert_clean([finding for finding in found if not allowed(finding)])


def test_a_reach_is_found() -> None:
    """What is one's own may be read of another of its kind."""
    for source in (
        "def f(opt):\n    return opt._held",
        "class A:\n    def f(self):\n        self.opt._held = 1",
        "from zerokern.optim.base import _held",
    ):
        assert len(reaches(source, "zerokern/checkpoint/x.py", frozenset({"_held"}))) == 1
    own = "class A:\n    def __init__(self, other):\n        self._held = other._held; self.version = other._version"
    assert reaches(own, "zerokern/optim/x.py", frozenset({"_held", "_version"})) == []
