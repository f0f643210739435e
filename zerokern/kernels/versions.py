"""Autograd hears of what the kernels write: torch counts its own writes only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["say_written"]


def say_written(tensors: Iterable[Tensor]) -> None:
    """Raises their versions, so that a backward pass that saved one of them raises instead of using new values.

    >>> x = torch.ones(2)
    >>> say_written([x]); x._version
    1
    """
    torch.autograd.graph.increment_version([one for one in tensors if not one.is_inference()])
