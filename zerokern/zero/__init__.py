"""What is sharded, where each element lives, and the hooks that move it; see README.md in this folder.

Its planning (`partition`, `stage`) needs no torch, so names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.zero.shard import Shard, shard_of
    from zerokern.zero.sharded import Sharded
    from zerokern.zero.sharding import Sharding

__all__ = ["Shard", "Sharded", "Sharding", "shard_of"]

_FILES = {"Shard": "shard", "Sharded": "sharded", "Sharding": "sharding", "shard_of": "shard"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.zero.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.zero' has no attribute {name!r}; it has {', '.join(__all__)}")
