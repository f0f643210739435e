"""What the pages of docs/ show and quote: blocks of code, rows of tables; and what the sources can say."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GAP = "…"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page, in order."""
    return BLOCK.findall(page(name))


def sides(diff: str) -> tuple[str, str]:
    """What a diff shows as it was, and as it is to be."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def quoted(name: str) -> list[str]:
    """The messages in the first cells of the tables whose head is `message`."""
    found, told = [], False
    for line in page(name).splitlines():
        if line.startswith("| message |"):
            told = True
        elif not line.startswith("|"):
            told = False
        elif told and not line.startswith("| ---"):
            found.append(line.split("|")[1].strip().strip("`"))
    return found


@cache
def messages() -> tuple[str, ...]:
    """Every text in the sources of the package, with a gap where a value is put in."""
    found: set[str] = set()
    for path in sorted((ROOT / "zerokern").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                found.add(text_of(node))
    return tuple(sorted(found))


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


def is_said(quote: str, texts: tuple[str, ...]) -> bool:
    """Whether some text has the parts of a quote, in their order."""
    parts = [part.strip() for part in quote.split(GAP) if part.strip(" .,:;")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return bool(parts) and any(pattern.search(text) for text in texts)
