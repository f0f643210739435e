"""What is sharded, where each element lives, and the hooks that move it; see README.md in this folder.

Its planning (`partition`, `stage`) needs no torch, so names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.zero.homes import Home, home_of
    from zerokern.zero.sharded import Sharded
    from zerokern.zero.sharding import Sharding

__all__ = ["Home", "Sharded", "Sharding", "home_of"]

_FILES = {"Home": "homes", "Sharded": "sharded", "Sharding": "sharding", "home_of": "homes"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.zero.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.zero' has no attribute {name!r}; it has {', '.join(__all__)}")
