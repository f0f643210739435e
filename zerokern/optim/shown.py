"""One tensor of state, as the optimizer holds it for a piece and as it is shown of the whole parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels.formats import BLOCK, blocks
from zerokern.optim.dtensors import DTensorHome
from zerokern.zero.homes import Home
from zerokern.zero.sharded import Sharded

__all__ = ["as_local", "as_shown"]


def _logical(home: Home, key: str) -> tuple[torch.Size, int, int]:
    """The shape of a parameter's state of that name, and (start, numel) of this rank's span of it."""
    if not key.endswith("_scale"):
        return home.shape, home.start, home.numel
    return torch.Size([blocks(home.shape.numel())]), home.start // BLOCK, blocks(home.numel)


def as_local(home: Home | DTensorHome, key: str, value: Any, *, own: bool = False) -> Any:
    """This rank's span of a value of state that is shown or was loaded: 1-D, a view of it unless it is to `own` it."""
    if isinstance(home, DTensorHome):
        return home.as_local(key, value, own=own)
    if key == "step" or not isinstance(value, Tensor):
        return value
    shape, start, numel = _logical(home, key)
    if value.shape != shape:
        raise StateError(
            f"{home.name}: state {key!r} has shape {tuple(value.shape)}, and {tuple(shape)} is needed, that of the "
            "whole parameter; this state belongs to another parameter"
        )
    if not isinstance(value, Sharded):
        span = value.detach().reshape(-1)[start : start + numel]
        return span.clone() if own and numel < value.numel() else span
    if (value.start, value.local.numel()) != (start, numel):
        raise StateError(
            f"{home.name}: state {key!r} holds elements {value.start}:{value.start + value.local.numel()} of "
            f"{tuple(shape)}, and this rank's are {start}:{start + numel}; it was kept on another rank, or with "
            "another number of ranks. Load whole tensors, or a checkpoint with zk.load, which divides it anew"
        )
    return value.local


def as_shown(home: Home | DTensorHome, key: str, value: Any, before: Any = None) -> Any:
    """State of a piece under its parameter's name; `before`, if it shows that already."""
    if isinstance(home, DTensorHome):
        return home.as_shown(key, value, before)
    if key == "step" or not isinstance(value, Tensor):
        return value
    shape, start, _ = _logical(home, key)
    if home.sharding.replicated:
        return value.view(shape)
    if isinstance(before, Sharded) and before.local is value and (before.shape, before.start) == (shape, start):
        return before
    return Sharded(value, shape, start, name=f"{home.name}.{key}", kind="state", group=home.sharding.group)
