"""Which implementation a call goes through, by name: where the tensors are decides, unless one is forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerokern.core import native
from zerokern.core.errors import BackendError
from zerokern.kernels.triton import backend

__all__ = ["CPU", "REFERENCE", "TRITON", "available", "implementation"]

CPU, REFERENCE, TRITON = "cpu", "reference", "triton"
_HOST = torch.device("cpu")


def available() -> list[str]:
    """Implementations that this machine can run: the reference, the CPU's from worst to best, then the GPU's.

    >>> available()[:2]
    ['reference', 'cpu.scalar']
    """
    return [REFERENCE, *(f"cpu.{name}" for name in native.isa_usable()), *([TRITON] if backend.usable() else [])]


@contextmanager
def implementation(name: str | None, device: torch.device = _HOST) -> Iterator[str]:
    """Forces an implementation for the length of a block; yields its family: "cpu", "triton" or "reference".

    The native choice is one for the process: forcing is for tests and measurements, not for threads that step at once.

    >>> with implementation(None) as family:
    ...     family
    'cpu'
    """
    if name is None:
        name = CPU if device.type == "cpu" else TRITON
    elif name not in available():
        raise BackendError(f"impl={name!r} was asked for; this machine has {', '.join(available())}")
    if name == TRITON:
        backend.check_device(device)
        with backend.launching(device):
            yield name
        return
    if name != REFERENCE and device.type != "cpu":
        raise BackendError(f"impl={name!r} works on cpu, and the tensors are on {device}; allowed: triton, reference")
    if "." not in name:
        yield name
        return
    before = native.isa_active()
    native.force_isa(name.removeprefix("cpu."))
    try:
        yield CPU
    finally:
        native.force_isa(before)
