"""Where Triton kernels run: on a GPU from sm_80 on, or, interpreted, on CPU tensors for tests."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zerokern.core.errors import BackendError

__all__ = ["check_device", "interpreted", "is_device", "launching", "usable"]

OLDEST = (8, 0)  # cvt.rn.bf16x2, 64-bit addresses in every path, and what the ahead-of-time tests compile for
INSTALL = "pip install 'zerokern[cuda]'"
INSTEAD = "what runs instead: impl='reference' for the ops (plain torch, slow), torch.optim for the optimizers"


def is_device(tensor: Tensor) -> bool:
    """Whether a tensor is for these kernels and for no other.

    >>> is_device(torch.ones(1))
    False
    """
    return tensor.is_cuda


def interpreted() -> bool:
    """Whether Triton interprets its kernels in this process (TRITON_INTERPRET=1), so that they run on CPU tensors.

    >>> interpreted() in (False, True)
    True
    """
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def usable() -> bool:
    """Whether some tensor of this process could go through these kernels.

    >>> usable() or not interpreted()
    True
    """
    return interpreted() or (torch.cuda.is_available() and importlib.util.find_spec("triton") is not None)


def launching(device: torch.device) -> AbstractContextManager[object]:
    """What a launch runs in: Triton launches on the current device, wherever its tensors are.

    >>> with launching(torch.device("cpu")): pass
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_device(device: torch.device) -> None:
    """Refuse a device that the kernels do not run on, naming it and what runs there.

    >>> check_device(torch.device("meta"))
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: no kernel runs on device meta; allowed: cuda devices from sm_80 on
    """
    if device.type == "cpu" and interpreted():
        return
    if device.type != "cuda":
        raise BackendError(f"no kernel runs on device {device}; allowed: cuda devices from sm_80 on")
    if interpreted():
        raise BackendError(
            f"interpreted kernels (TRITON_INTERPRET=1) cannot reach the memory of {device}; do: unset TRITON_INTERPRET"
        )
    _check_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _check_gpu(index: int) -> None:
    if importlib.util.find_spec("triton") is None:
        raise BackendError(f"triton is not installed, and tensors on cuda need it; do: {INSTALL}; {INSTEAD}")
    refuse_before(OLDEST, torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index))


def refuse_before(oldest: tuple[int, int], found: tuple[int, int], name: str) -> None:
    """Raise where a GPU is of an older architecture.

    >>> refuse_before((8, 0), (9, 0), "NVIDIA H200")
    """
    if found < oldest:
        have, need = ("sm_{}{}".format(*version) for version in (found, oldest))
        raise BackendError(f"{name} is {have}, and the kernels need {need} or newer; {INSTEAD}")
