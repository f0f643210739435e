"""Parameters that do not lie in host memory: which devices are served, and what is needed there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.kernels.triton import backend
from zerokern.kernels.triton.backend import capturing

__all__ = ["Kernels", "capturing", "holds", "kernels", "refuse_capture", "require", "serves"]


def serves(device: torch.device) -> bool:
    """Whether parameters on this device are updated where they lie, by kernels of its own.

    >>> serves(torch.device("cuda", 1)), serves(torch.device("cpu"))
    (True, False)
    """
    return device.type == "cuda"


def holds(params: Any) -> bool:
    """Whether the first of a group's parameters, named or not, is on such a device."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    first = listed[0] if listed else None
    first = first[1] if isinstance(first, tuple) else first
    return isinstance(first, Tensor) and serves(first.device)


def refuse_capture(device: torch.device) -> None:
    """A CUDA graph repeats what it has seen: making state in one would make it anew at every replay."""
    if capturing(device):
        raise StateError(
            "a step that makes or takes over optimizer state cannot go into a CUDA graph, which would repeat that at "
            "every replay; call step() once with the same gradients set before the capture begins"
        )


def require(device: torch.device, tier: Any) -> None:
    """Refuse a place for state that the device cannot reach, and a device that the kernels do not run on."""
    if tier != "device":
        raise ValueError(got("tier", tier, f"'device' for parameters on {device}", "Or move the model to the CPU"))
    backend.check_device(device)


class Kernels(NamedTuple):
    """What launches an update, and what it is told to decide on the device."""

    table: Any
    control: Any
    sums: Any


def kernels() -> Kernels:
    """Triton is imported here, so not before there is a parameter that needs it."""
    from zerokern.kernels.triton.sumsq import SumsqTable
    from zerokern.kernels.triton.table import Control, DeviceTable

    return Kernels(DeviceTable, Control, SumsqTable)
