"""Ports, through which the core reaches what stands beside it.

The package says what is plugged in (`zerokern/__init__.py`). The core knows only the names of the ports, and works
without plugs. A plug is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["PLUGS", "plugs"]

PLUGS: dict[str, tuple[str, ...]] = {}  # by port: "module:name" of each plug, in the order in which they are asked


def plugs(port: str) -> list[Any]:
    """Returns what is plugged into a port.

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
