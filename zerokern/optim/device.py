"""Parameters that do not lie in host memory: which devices are served, what is needed there, and the way to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.kernels.triton import backend
from zerokern.kernels.triton.backend import capturing
from zerokern.memory.copies import Driver
from zerokern.memory.staging import EMULATED_DRIVERS, CudaDriver

__all__ = [
    "EMULATED_DRIVERS",
    "Kernels",
    "capturing",
    "driver_of",
    "holds",
    "is_apart",
    "kernels",
    "put_in_place",
    "refuse_capture",
    "require",
    "serves",
]


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


def driver_of(param: Tensor) -> Any:
    """What copies to and from a parameter's device go through; None in host memory.

    >>> driver_of(torch.ones(1)) is None
    True
    """
    if serves(param.device):
        return CudaDriver(param.device)
    return EMULATED_DRIVERS.get(param)


def is_apart(param: Tensor) -> bool:
    """Whether a parameter lies on a device, so that host memory is elsewhere."""
    return serves(param.device) or (len(EMULATED_DRIVERS) > 0 and param in EMULATED_DRIVERS)


def put_in_place(driver: Driver, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies (dst, src) on the device, behind all that its compute stream has been given; nobody waits.

    The tensors' versions are the caller's to count, now.
    """

    def copy() -> None:
        with torch.no_grad():
            torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])

    getattr(driver, "launch", _at_once)(copy)


def _at_once(work: Callable[[], object]) -> None:
    work()
