"""Memory as the kernel counts it: pages that this process really has."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

__all__ = ["MIB", "SLACK", "large_things_apart", "pages", "peak", "restart_peak"]

MIB = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
SLACK = MIB // 2  # stacks, code objects, and what the allocator keeps for small things


def pages(collected: bool = True) -> int:
    """Bytes of anonymous memory that this process really has."""
    if collected:
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def large_things_apart() -> None:
    """malloc keeps no large block: what is freed leaves the process, so that pages are what is held."""
    gc.collect()
    gc.freeze()  # what was imported need not be looked at each time
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 16)


def peak() -> int:
    """The most bytes that this process has had since `restart_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
