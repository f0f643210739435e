"""Between host memory and the device that parameters lie on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zerokern.memory.copies import Driver
from zerokern.memory.staging import CudaDriver
from zerokern.optim import device

__all__ = ["OTHERS", "driver_of", "is_apart", "on_device", "put_in_place"]

OTHERS = WeakTensorKeyDictionary()
"""Tensors on devices that torch does not know, with their drivers: who plays a device writes its tensors in here."""


def driver_of(param: Tensor) -> Any:
    """What copies to and from a parameter's device go through; None in host memory.

    >>> driver_of(torch.ones(1)) is None
    True
    """
    if device.serves(param.device):
        return CudaDriver(param.device)
    return OTHERS.get(param)


def is_apart(param: Tensor) -> bool:
    """Whether a parameter lies on a device, so that host memory is elsewhere."""
    return device.serves(param.device) or (len(OTHERS) > 0 and param in OTHERS)


def on_device(driver: Any, work: Callable[[], object]) -> None:
    """What `work` launches comes behind all that the device's compute stream has been given; nobody waits."""
    launch = getattr(driver, "launch", None)
    if launch is None:
        work()
    else:
        launch(work)


def put_in_place(driver: Driver, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies (dst, src) on the device. The tensors' versions are the caller's to count, now."""

    def copy() -> None:
        with torch.no_grad():
            torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])

    on_device(driver, copy)
