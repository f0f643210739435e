"""Bytes per rank, role and tier: planned before anything is allocated, and measured while training. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerokern.planner.planning import Plan, plan
from zerokern.planner.transformer import Transformer, from_config, preset

if TYPE_CHECKING:
    from zerokern.planner.measuring import Measured, measure

__all__ = ["Measured", "Plan", "Transformer", "from_config", "measure", "plan", "preset"]


def __getattr__(name: str) -> Any:
    """Imports what measures on demand: it needs torch, which planning a number does not."""
    if name in ("Measured", "measure"):
        return getattr(importlib.import_module("zerokern.planner.measuring"), name)
    raise AttributeError(f"module 'zerokern.planner' has no attribute {name!r}")
