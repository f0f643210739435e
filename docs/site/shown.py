"""How pages look: the version in the header, and names in table cells that stay in one piece."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
CODE = re.compile(r"<code>([^<]*)</code>")
INTERVAL = re.compile(r"(<strong>[\d.]+x</strong>) (\([\d.]+ to [\d.]+\))")
LONGEST = 34  # characters; what is longer may break, at its spaces, and within a long word after dots and signs


def unbroken(html: str) -> str:
    """The page with a class for short code in the cells of its tables, which the style sheet keeps in one line.
    The interval of a ratio stands below it.
    """

    def marked(code: re.Match[str]) -> str:
        if len(code[1]) <= LONGEST:
            return f'<code class="name">{code[1]}</code>'
        words = (
            re.sub(r"([.=,])(?=\w)", r"\1<wbr>", word) if len(word) > LONGEST else word for word in code[1].split(" ")
        )
        return f"<code>{' '.join(words)}</code>"

    return CELL.sub(lambda cell: INTERVAL.sub(r"\1<br>\2", CODE.sub(marked, cell[0])), html)


def on_page_content(html: str, **_: Any) -> str:
    """A hook of MkDocs, called for each page once it is HTML."""
    return unbroken(html)


def on_config(config: Any, **_: Any) -> Any:
    """A hook of MkDocs, called before anything is built."""
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    config.site_name = f"{config.site_name} {VERSION.findall(project)[0]}"
    return config
