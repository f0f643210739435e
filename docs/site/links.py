"""Links that leave `docs/` lead to the same file in the repository; pictures of results are copied into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
REPOSITORY = "https://github.com/zerokern/zerokern/blob/main/"
PICTURE = re.compile(r"\]\(\.\./bench/results/([^)\s]+\.png)\)")
OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def inside(markdown: str) -> str:
    """A page with links that work in the site."""
    return OUTSIDE.sub(rf"]({REPOSITORY}\1)", PICTURE.sub(r"](results/\1)", markdown))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of MkDocs, called for each page."""
    return inside(markdown)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """A hook of MkDocs, called once it has found the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files
