"""Where what stands beside the core plugs into it.

The package itself says what is plugged in (`zerokern/__init__.py`); the core knows the names of the ports alone, and
does without where nothing is plugged in. A plug is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["PLUGS", "plugs"]

PLUGS: dict[str, tuple[str, ...]] = {}  # by port: "module:name" of each plug, in the order in which they are asked


def plugs(port: str) -> list[Any]:
    """What is plugged into a port.

    >>> PLUGS["example"] = ("math:sqrt",)
    >>> [plug(9.0) for plug in plugs("example")], plugs("no such port")
    ([3.0], [])
    >>> del PLUGS["example"]
    """
    found = []
    for where in PLUGS.get(port, ()):
        module, _, name = where.partition(":")
        found.append(getattr(importlib.import_module(module), name))
    return found
