"""What the C library does with memory that is freed: gives it back, page by page, or keeps it for who asks next."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["keep_freed"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 32 << 20  # glibc serves larger blocks by pages of their own, whatever it is told


def keep_freed(nbytes: int) -> bool:
    """Let the C library keep up to nbytes of freed memory, for the process as a whole; whether it could be told.

    Memory that is freed and asked for again in every step costs a page fault for each 4 KiB of it otherwise: more time
    than filling it takes. Only glibc is told; other allocators keep memory by themselves. Never lowers what was asked
    for before.

    >>> keep_freed(0) in (True, False)
    True
    """
    mallopt = _mallopt()
    if mallopt is None or nbytes <= _most.nbytes:
        return mallopt is not None
    _most.nbytes = nbytes
    # naming either switches off that glibc adapts both
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, min(nbytes, 2**31 - 1)))


class _Most:
    """What the one heap of this process has been told."""

    nbytes = 0


_most = _Most()


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    library = ctypes.CDLL(None)
    return getattr(library, "mallopt", None) if hasattr(library, "gnu_get_libc_version") else None
