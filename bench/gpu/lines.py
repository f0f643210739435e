"""The JSON lines that sections lay down while they run, and what they say together.

A line is written whole or not at all, so whatever ends a section leaves what it had found until then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LISTS = ("rows", "contests", "facts", "could_not")


def write(file: Path, kind: str, content: dict[str, Any]) -> None:
    """Appends one line, which is on its way to the disk when this returns."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"kind": kind, **content}) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a section; a last one that it had no time to finish is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def merged(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows, contests, facts, figures and what could not run. Of a contest and of a figure the last line counts.

    >>> lines = [{"kind": "figure", "key": "a", "value": 1}, {"kind": "figure", "key": "a", "value": 2}]
    >>> merged(lines)["figures"]
    {'a': {'value': 2}}
    """
    found: dict[str, Any] = {name: [] for name in LISTS}
    figures: dict[str, Any] = {}
    outcomes: dict[str, dict[str, Any]] = {}
    for entry in entries:
        kind, content = entry["kind"], {name: value for name, value in entry.items() if name != "kind"}
        if kind == "outcome":
            outcomes[content["contest"]["name"]] = content
        elif kind == "figure":
            figures[content.pop("key")] = content
        else:
            found["facts" if kind == "fact" else "could_not"].append(content)
    found["contests"] = [outcome["contest"] for outcome in outcomes.values()]
    found["rows"] = [row for outcome in outcomes.values() for row in outcome["rows"]]
    return {"figures": figures, **found}
