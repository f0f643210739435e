"""Reads checkpoints and weights of other libraries, and writes weights for them.

Names are imported when they are first used, as those of the package itself are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokern.interop.exporter import export
    from zerokern.interop.pretrained import load_pretrained

__all__ = ["export", "load_pretrained"]

_FILES = {"export": "exporter", "load_pretrained": "pretrained"}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f"zerokern.interop.{_FILES[name]}"), name)
    raise AttributeError(f"module 'zerokern.interop' has no attribute {name!r}; it has {', '.join(__all__)}")
