"""Between host memory and the device that parameters lie on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.memory.copies import Driver
from zerokern.memory.staging import CudaDriver
from zerokern.optim import device

__all__ = ["driver_of", "on_device", "put_in_place"]


def driver_of(param: Tensor) -> Any:
    """What copies to and from a parameter's device go through; None in host memory.

    A tensor that plays being on a device (`zerokern.schedule.played`) carries its driver.

    >>> driver_of(torch.ones(1)) is None
    True
    """
    played = getattr(param, "_zk_driver", None)
    if played is not None:
        return played
    return CudaDriver(param.device) if device.serves(param.device) else None


def on_device(driver: Any, work: Callable[[], None]) -> None:
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
