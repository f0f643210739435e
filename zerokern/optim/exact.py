"""What a parameter was before its dtype rounded it: its first master, or remainder, is exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerokern.kernels import split
from zerokern.optim.formats import Slot

__all__ = ["Exact", "begin"]

Exact = Callable[[Tensor], Tensor | None]  # the fp32 values of a parameter, if there are any, handed over once


def begin(param: Tensor, slot: Slot, kept: Tensor, exact: Tensor | None) -> None:
    """Let a new master, or a remainder that is zero, begin from what the parameter holds.

    `exact`: the fp32 values that it was rounded from. They count where they still round to it.
    """
    if exact is None:
        if slot.key == "master":
            kept.copy_(param)
        return
    param, exact = param.detach(), exact.view_as(param)
    if slot.key == "master":
        kept.copy_(torch.where(_rounds_to(param, exact), exact, param.float()))
    elif slot.dtype is torch.int16:
        kept.copy_(torch.where(_rounds_to(param, exact), split(exact, "split16")[1], 0))
    else:  # rounded to 24 bits first, a value may lie in the upper half of the next bf16
        high, remainder = split(exact, "split8")
        same = _rounds_to(param, exact) | (high.view(torch.int16) == param.view(torch.int16))
        kept.copy_(torch.where(same, remainder, 0))
        param.copy_(torch.where(same, high, param))


def _rounds_to(param: Tensor, exact: Tensor) -> Tensor:
    """Where a parameter holds what zk.shard rounds a value to."""
    rounded = split(exact, "split16")[0] if param.dtype is torch.bfloat16 else exact.to(param.dtype)
    return rounded.view(torch.int16) == param.view(torch.int16)
