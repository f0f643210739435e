"""The first launch on a GPU is a trial whose bits are compared: where it fails, that is said once and Triton stays."""

from __future__ import annotations

import functools

import torch

from zerokern.core.errors import say_once
from zerokern.kernels import reference_device
from zerokern.kernels.checks import SpanList
from zerokern.kernels.cuda import loader
from zerokern.kernels.cuda.bucket import BucketLaunches
from zerokern.kernels.triton.backend import capturing

__all__ = ["available"]


def available(device: torch.device) -> bool:
    """Returns whether these kernels run on a device; what is missing, or failed, is logged once by name.

    The first call for a GPU compiles and launches one, and waits for it; within a capture it does not, and says no.

    >>> available(torch.device("cpu"))
    False
    """
    found = loader.reason(device)
    if found is None:
        if device not in _tried and capturing(device):
            return False
        _tried.add(device)
        found = _failure(device)
    if found and device.type == "cuda":
        say_once(__name__, f"the kernels of zerokern.kernels.cuda are not used: {found}")
    return not found


_tried: set[torch.device] = set()


@functools.cache
def _failure(device: torch.device) -> str | None:
    """Returns what is wrong with a small list that was flattened on a device."""
    try:
        sources = [torch.linspace(-9.0, 7.0, n, dtype=torch.bfloat16, device=device) for n in (20_002, 7, 33)]
        bucket, stats = torch.zeros(20_043, device=device), torch.zeros(2, dtype=torch.float64, device=device)
        launches = BucketLaunches(device, SpanList(sources, [0, 20_003, 20_010]).members, bucket.dtype)
        launches.run(True, [one.data_ptr() for one in sources], bucket, 0.3, None, stats)
        written = [(one.float() * 0.3).cpu() for one in sources]
        expected = torch.cat([written[0], torch.zeros(1, device="cpu"), *written[1:]])
        total = reference_device.moved_sumsq(written, expected.itemsize)
    except Exception as error:  # of CuPy, NVRTC or the driver: whatever it is, Triton can do without
        return f"a first launch failed: {error!r}"
    if not torch.equal(bucket.cpu(), expected) or stats.tolist() != [total, 0.0]:
        return "a first launch gave other bits than its reference; please report it"
    return None
