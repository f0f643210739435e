"""Checkpoints: written at the disk's speed, read into any world size, stage, tier and format, never trusted unchecked.

The index and the command line need no torch, so names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.saving.background import Saving
    from zerokern.saving.exporter import export
    from zerokern.saving.loader import load
    from zerokern.saving.pretrained import load_pretrained
    from zerokern.saving.saver import save

__all__ = ["Saving", "export", "load", "load_pretrained", "save"]

_FILES = {
    "Saving": "background",
    "export": "exporter",
    "load": "loader",
    "load_pretrained": "pretrained",
    "save": "saver",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.saving.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.saving' has no attribute {name!r}; it has {', '.join(__all__)}")
