"""Checkpoints: written at the disk's speed, read into any world size, stage, tier and format, never trusted unchecked.

The index and the command line need no torch, so names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.checkpoint.background import Saving
    from zerokern.checkpoint.folder import latest
    from zerokern.checkpoint.loader import load
    from zerokern.checkpoint.saver import save

__all__ = ["Saving", "latest", "load", "save"]

_FILES = {"Saving": "background", "latest": "folder", "load": "loader", "save": "saver"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.checkpoint.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.checkpoint' has no attribute {name!r}; it has {', '.join(__all__)}")
