"""Checkpoints: written at the disk's speed, read into any world size, stage, tier and format, never trusted unchecked.

The index and the command line need no torch, so names are imported when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.saving.background import Saving
    from zerokern.saving.export import export
    from zerokern.saving.load import load
    from zerokern.saving.pretrained import load_pretrained
    from zerokern.saving.save import save

__all__ = ["Saving", "export", "load", "load_pretrained", "save"]

_FILES = {
    "Saving": "background",
    "export": "export",
    "load": "load",
    "load_pretrained": "pretrained",
    "save": "save",
}


class _Face(ModuleType):
    """Here `save` is the function, even after save.py was imported, which would put the file in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FILES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.saving.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.saving' has no attribute {name!r}; it has {', '.join(__all__)}")
