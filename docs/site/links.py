"""Pages and tables that lie elsewhere in the repository, links between pages and files, and pictures of results.

A link of a page leads to another page of the site where there is one, and else to the file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "bench/results/"
REPOSITORY = "https://github.com/zerokern/zerokern/blob/main/"
# pages of the site that are no files in docs/
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
    "measuring.md": "bench/README.md",
    "facts.md": "bench/FACTS.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
PART = re.compile(r"^<!-- from (\S+): (\w+) -->$", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def inside(markdown: str, source: str) -> str:
    """The text of a file of the repository with links that work in the site."""
    pages = {path: page for page, path in ELSEWHERE.items()}

    def led(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        anchor = link[2] or ""
        if path.startswith("docs/"):
            return path.removeprefix("docs/") + anchor
        if path in pages:
            return pages[path] + anchor
        if path.startswith(RESULTS) and path.endswith(".png"):
            return "results/" + path.removeprefix(RESULTS)
        return REPOSITORY + path + anchor

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def included(markdown: str) -> str:
    """The text with parts of other files, which stand between markers there: one table is kept in one place."""

    def part(wanted: re.Match[str]) -> str:
        text = (ROOT / wanted[1]).read_text(encoding="utf-8")
        found = re.search(f"<!-- {wanted[2]}:begin -->\n(.*?)<!-- {wanted[2]}:end -->", text, re.DOTALL)
        if found is None:
            raise ValueError(f"{wanted[1]} has no part between <!-- {wanted[2]}:begin --> and <!-- {wanted[2]}:end -->")
        return inside(found[1], wanted[1])

    return PART.sub(part, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A hook of MkDocs, called for each page."""
    path = page.file.src_uri
    return included(inside(markdown, ELSEWHERE.get(path, f"docs/{path}")))


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """A hook of MkDocs, called once it has found the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for page, path in ELSEWHERE.items():
        file = File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8"))
        file.edit_uri = f"../{path}"
        files.append(file)
    return files
