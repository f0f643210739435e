"""A copy of the installed package that notes which of its blocks run: functions, branches, loops and handlers.

At the head of each block stands `_zk_ran[NUMBER] = 1`, where `_zk_ran` is a file mapped into every process that
imports the copy: ranks, forked programs and fresh interpreters write into the same bytes. A block costs one store, so
times stay near those of the package as it is.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from overlay import Tree, laid_over

__all__ = ["noting_copy"]

BEGIN = "import mmap as _zk_mmap, os as _zk_os\n_zk_ran = _zk_mmap.mmap(_zk_os.open({path!r}, _zk_os.O_RDWR), 0)\n"
SUITES = ("body", "orelse", "finalbody")
COMPILED = ("jit", "compile", "autotune", "heuristics")  # decorators of functions whose source something else reads


class Noting(ast.NodeTransformer):
    """Puts a note at the head of each block, and keeps a name for each: the function that the block lies in."""

    def __init__(self, module: str, first: int) -> None:
        self.names: list[str] = []
        self._within, self._first = [module], first

    def _note(self) -> ast.stmt:
        number = self._first + len(self.names)
        self.names.append(".".join(self._within))
        return ast.parse(f"_zk_ran[{number}] = 1").body[0]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if any(word in ast.unparse(one) for one in node.decorator_list for word in COMPILED):
            return node
        self._within.append(node.name)
        keeps_docstring = int(ast.get_docstring(node, clean=False) is not None)
        node.body.insert(keeps_docstring, self._note())
        self.generic_visit(node)
        self._within.pop()
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if len(self._within) > 1 and isinstance(node, (ast.If, ast.For, ast.While, ast.Try, ast.ExceptHandler)):
            for name in SUITES:
                suite = getattr(node, name, None)
                if suite and not (name == "orelse" and isinstance(node, ast.If) and isinstance(suite[0], ast.If)):
                    suite.insert(0, self._note())
        return node


def noting_copy(tree: Tree, folder: Path) -> Path:
    """`folder`/zerokern, a copy of the package that notes into `folder`/ran; the names of blocks lie beside it."""
    copy = laid_over(tree, folder, None, None) / "zerokern"
    ran, names = folder / "ran", list[str]()
    for path in sorted(copy.rglob("*.py")):
        inside = path.relative_to(copy)
        if inside.parts[0] in ("bench", "examples") or "triton" in inside.parts:
            continue
        source, noting = ast.parse(path.read_text()), Noting(str(inside.with_suffix("")).replace("/", "."), len(names))
        noting.visit(source)
        if not noting.names:
            continue
        names += noting.names
        begin = ast.parse(BEGIN.format(path=str(ran))).body
        at = _behind_imports_of_the_future(source)
        source.body[at:at] = begin
        path.write_text(ast.unparse(ast.fix_missing_locations(source)) + "\n")
    ran.write_bytes(bytes(len(names)))
    (folder / "names.json").write_text(json.dumps(names))
    return folder


def _behind_imports_of_the_future(tree: ast.Module) -> int:
    at = int(ast.get_docstring(tree, clean=False) is not None)
    while at < len(tree.body) and isinstance(tree.body[at], ast.ImportFrom) and tree.body[at].module == "__future__":  # type: ignore[attr-defined]
        at += 1
    return at
