"""Names for what runs, as torch.profiler shows them: `unshard layers.3`, `update bucket 2`. No torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["named"]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_VERBS = {"Step": "update"}  # of ops, where the one that they have says less


def named(verb: str, what: str) -> AbstractContextManager[Any]:
    """Context manager whose content has a name in a profile that is being made, in any thread; else it does nothing.

    >>> import torch
    >>> with torch.profiler.profile() as profiled, named("unshard", "layers.3"):
    ...     _ = torch.ones(2) + 1
    >>> "unshard layers.3" in [event.name for event in profiled.events()]
    True
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return _NOTHING
    found: AbstractContextManager[Any] = profiler.record_function(f"{_VERBS.get(verb, verb.lower())} {what}")
    return found
