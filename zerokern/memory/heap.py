"""Tells the C library whether to keep freed memory for reuse, or to return it to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["keep_freed", "mmap_large_blocks", "trim_heap"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20
_kept = [-1]  # bytes that the heap of this process keeps as it was asked to; -1: nobody has asked
LARGEST = 32 << 20  # glibc serves larger blocks by pages of their own, whatever it is told


def keep_freed(nbytes: int) -> bool:
    """Let the C library keep up to nbytes of freed memory, for the process as a whole; returns whether it could be
    told.

    Otherwise memory that is freed and allocated in every step costs a page fault for each 4 KiB: more time than filling
    it. Only glibc is told; other allocators keep memory by themselves. Never lowers an earlier request, until
    `mmap_large_blocks`.

    >>> keep_freed(0) in (True, False)
    True
    """
    if nbytes > max(_kept[0], 0):
        # setting either one disables glibc's adaptation of both
        mallopt = _of_glibc("mallopt")
        if not (mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, min(nbytes, 2**31 - 1))):
            return False
        _kept[0] = nbytes
    return True


def mmap_large_blocks() -> bool:
    """Let the C library map every block from 1 MiB on by itself, so that it is returned to the system when it is freed.

    Otherwise small blocks that stay leave holes between them that no large block fits into. The price is a page fault
    for each 4 KiB. The last call counts: a model that is short of memory takes back what an earlier one asked to keep.

    >>> mmap_large_blocks() in (True, False)
    True
    """
    mallopt = _of_glibc("mallopt")
    _kept[0] = -1
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST))


def trim_heap() -> None:
    """Let the C library return all freed memory to the system now.

    A large block that was freed between two small ones stays otherwise, and the next of its size may not fit there.

    >>> trim_heap()
    """
    _of_glibc("malloc_trim")(0)


@functools.cache
def _of_glibc(name: str) -> Callable[..., int]:
    """Returns a function of glibc; of another C library one that says it has done nothing."""
    library = ctypes.CDLL(None)
    return getattr(library, name) if hasattr(library, "gnu_get_libc_version") else lambda *_: 0
