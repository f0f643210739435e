"""Where Triton kernels run: on a GPU from sm_80 on, or, interpreted, on CPU tensors for tests."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from zerokern.core.errors import BackendError, say_once

__all__ = [
    "OLDEST", "beside_captures", "capturing", "check_device", "interpreted", "launching", "make_stream",
    "refuse_before", "rounds_fma_once", "runs_on", "usable",
]  # fmt: skip

OLDEST = (8, 0)  # cvt.rn.bf16x2, 64-bit addresses in every path, and what the ahead-of-time tests compile for
_ROUNDED_TWICE = (
    "Triton before 3.9 interprets (TRITON_INTERPRET=1) a fused multiply-add with two roundings: last bits differ from "
    "those of a GPU. With NumPy 2.4 it fails ('only 0-dimensional arrays can be converted'). Use Triton 3.9, or NumPy "
    "2.3 where last bits do not matter"
)
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the legacy default stream, nor does that one for it
_HIGH = -1  # a stream's priority, as torch counts
INSTALL = "pip install 'zerokern[cuda]'"
INSTEAD = "impl='reference' for the ops (plain torch, slow), torch.optim for the optimizers"


def interpreted() -> bool:
    """Whether Triton interprets its kernels in this process (TRITON_INTERPRET=1), so that they run on CPU tensors.

    >>> interpreted() in (False, True)
    True
    """
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def rounds_fma_once() -> bool:
    """Whether Triton's interpreter rounds a fused multiply-add once, as a GPU does: from Triton 3.9 on."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


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


def capturing(device: torch.device) -> bool:
    """Whether what is launched there now goes into a CUDA graph instead of running.

    >>> capturing(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def beside_captures() -> Iterator[None]:
    """Lets this thread ask CUDA what captures forbid: whether an event has passed, or for pinned memory.

    A capture in torch's default mode, "global", is broken off where any thread asks that. torch has a guard for it in
    C++ alone. Of an event that was itself recorded in a capture nobody can ask.

    >>> with beside_captures(): pass
    """
    exchange, mode = _of_driver("cuThreadExchangeStreamCaptureMode"), ctypes.c_int(_RELAXED)
    exchanged = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchange is not None and exchanged:
            exchange(ctypes.byref(mode))  # it holds the mode from before


def make_stream() -> int:
    """Makes a stream of high priority on the current device and returns its handle, which none of torch's streams has.

    torch hands its streams out in turn: the 33rd request gets the first one again. Nobody destroys this one.
    """
    create, stream = _of_driver("cuStreamCreateWithPriority"), ctypes.c_void_p()
    code = None if create is None else create(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(_HIGH))
    if code != 0 or not stream.value:
        raise BackendError(f"the CUDA driver has made no stream: {'it is not there' if code is None else code}")
    return stream.value


@functools.cache
def _of_driver(name: str) -> Callable[..., int] | None:
    """The function of that name of the CUDA driver; None if there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):  # no driver, or an old one
        return None


def runs_on(device: torch.device) -> bool:
    """Whether some implementation that is not the reference works there: a GPU may be too old, or Triton missing.

    >>> runs_on(torch.device("cpu")), runs_on(torch.device("meta"))
    (True, False)
    """
    if device.type == "cpu":
        return True
    try:
        check_device(device)
    except BackendError:
        return False
    return True


def check_device(device: torch.device) -> None:
    """Refuse a device that the kernels do not run on, naming it and what runs there.

    >>> check_device(torch.device("meta"))
    Traceback (most recent call last):
    ...
    zerokern.core.errors.BackendError: no kernel runs on device meta; allowed: cuda devices from sm_80 on
    """
    if device.type == "cpu" and interpreted():
        if not rounds_fma_once():
            say_once(__name__, _ROUNDED_TWICE)
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
        raise BackendError(
            f"triton is not installed, and tensors on cuda need it; do: {INSTALL}; what runs instead: {INSTEAD}"
        )
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    refuse_before(capability, name)


def refuse_before(found: tuple[int, int], name: str) -> None:
    """Raise where a GPU is of an older architecture than the kernels are for.

    >>> refuse_before((9, 0), "NVIDIA H200")
    """
    if found < OLDEST:
        have, need = ("sm_{}{}".format(*version) for version in (found, OLDEST))
        raise BackendError(f"{name} is {have}, and the kernels need {need} or newer; what runs instead: {INSTEAD}")
