"""Counts that stand twice on the page about the architecture, or can be counted here, agree."""

from __future__ import annotations

import re

from .tree import files, read


def test_counts_of_the_page_agree() -> None:
    page = read("docs/architecture.md")
    now = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| ([^|]+?) \|$", page, re.MULTILINE))
    needed = re.findall(r"^\| [^|]+ \| (\d+) \| `", page, re.MULTILINE)
    assert now["concepts behind a step, a gather, a save, a tier"] == ", ".join(needed) and len(needed) == 4
    (walk,) = re.findall(r"^It passes at most (\d+) functions in (\d+) files", page, re.MULTILINE)
    assert now["functions and files that a gradient passes"] == " in ".join(walk)
    folders = ("zerokern/zero/", "zerokern/optim/")
    assert now["files of `zero/` and `optim/`"] == str(len(files(".py", under=folders)))
