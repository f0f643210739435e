"""How the reference shows docstrings: examples as code, and "name: what it is" as a list."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ITEM = re.compile(r"^(?P<name>[a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)


def shown(text: str) -> str:
    """Markdown of a docstring."""
    parts = []
    for part in text.split("\n\n"):
        if part.startswith("Args:\n"):
            parts.append("**Arguments**")
            part = textwrap.dedent(part.removeprefix("Args:\n"))
        if part.startswith(">>>"):
            parts.append(f"```pycon\n{part}\n```")
        elif len(ITEM.findall(part)) > 1 or re.match(ITEM, part):
            parts.append(ITEM.sub(r"- **\g<name>**: ", part))
        else:
            parts.append(part)
    return "\n\n".join(parts)


class Examples(griffe.Extension):
    """Called for whatever has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)
