"""How pages look: the version in the header, and names in table cells that stay in one piece."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
CODE = re.compile(r"<code>([^<]*)</code>")
LONGEST = 34  # characters; what is longer may break, but at its spaces alone


def unbroken(html: str) -> str:
    """The page with a class for short code in the cells of its tables, which the style sheet keeps in one line."""

    def marked(code: re.Match[str]) -> str:
        name = " " not in code[1] or len(code[1]) <= LONGEST
        return f'<code class="name">{code[1]}</code>' if name else code[0]

    return CELL.sub(lambda cell: CODE.sub(marked, cell[0]), html)


def on_page_content(html: str, **_: Any) -> str:
    """A hook of MkDocs, called for each page once it is HTML."""
    return unbroken(html)


def on_config(config: Any, **_: Any) -> Any:
    """A hook of MkDocs, called before anything is built."""
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    config.site_name = f"{config.site_name} {VERSION.findall(project)[0]}"
    return config
