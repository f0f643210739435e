"""Links that leave `docs/` lead to the same file in the repository; those within stay as they are."""

from __future__ import annotations

import re
from typing import Any

REPOSITORY = "https://github.com/zerokern/zerokern/blob/main/"
OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of MkDocs, called for each page."""
    return OUTSIDE.sub(rf"]({REPOSITORY}\1)", markdown)
