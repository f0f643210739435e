"""One vocabulary: words that the glossary rules out stand on no page and in no message."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

from .tree import ROOT, read

GLOSSARY = "docs/glossary.md"
SHORT = 3  # words; shorter strings are names and keys


def ruled_out() -> list[str]:
    """The first column of the glossary's last table."""
    table = read(GLOSSARY).partition("## Words that these pages do not use")[2]
    return [found for row in table.splitlines() if row.startswith("| ") for found in re.findall(r"\| \"(.+?)\"", row)]


def pages() -> list[str]:
    named = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in named.splitlines() if name != GLOSSARY]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module that are sentences, but for docstrings."""
    tree = ast.parse(source)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        if is_text and len(node.value.split()) >= SHORT:
            yield node.lineno, node.value


def misused(text: str, words: list[str]) -> list[str]:
    return [word for word in words if re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text, re.IGNORECASE)]


def test_no_page_has_a_word_that_the_glossary_rules_out() -> None:
    words = ruled_out()
    assert len(words) >= 8
    found = {
        f"{page}:{number}": misused(line, words)
        for page in pages()
        for number, line in enumerate(read(page).splitlines(), 1)
    }
    assert {place: some for place, some in found.items() if some} == {}


def test_no_message_has_one() -> None:
    words = ruled_out()
    found = {
        f"{path.relative_to(ROOT)}:{line}": misused(text, words)
        for path in sorted((ROOT / "zerokern").rglob("*.py"))
        for line, text in messages(path.read_text())
    }
    assert {place: some for place, some in found.items() if some} == {}


def test_a_misused_word_is_found() -> None:
    assert misused("what cannot be right is Refused by name here", ["refused by name", "foretold"]) == [
        "refused by name"
    ]
    assert misused("`FILE.foretold.json` and unforetold", ["foretold"]) == []
    assert [text for _, text in messages('"""Of a module, a docstring."""\nx = "a message with words"\ny = "key"')] == [
        "a message with words"
    ]
