"""What the C library does with memory that is freed: gives it back, page by page, or keeps it for who asks next."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["give_back", "keep_freed", "map_large"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20
LARGEST = 32 << 20  # glibc serves larger blocks by pages of their own, whatever it is told


def keep_freed(nbytes: int) -> bool:
    """Let the C library keep up to nbytes of freed memory, for the process as a whole; whether it could be told.

    Memory that is freed and asked for again in every step costs a page fault for each 4 KiB of it otherwise: more time
    than filling it takes. Only glibc is told; other allocators keep memory by themselves. Never lowers what was asked
    for before, since `map_large`.

    >>> keep_freed(0) in (True, False)
    True
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None or nbytes <= _most.nbytes:
        return mallopt is not None
    _most.nbytes = nbytes
    # naming either switches off that glibc adapts both
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, min(nbytes, 2**31 - 1)))


def map_large() -> bool:
    """Let the C library map every block from 1 MiB on by itself, for the process as a whole, so that it is given back
    as soon as it is freed; whether it could be told. Between small blocks that stay, large ones would leave holes that
    no other fits into, without end. A page fault for each 4 KiB is the price. Who is told last counts: a model that
    memory is short for takes back what one before it asked to keep.

    >>> map_large() in (True, False)
    True
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    _most.nbytes = 0
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST))


def give_back() -> None:
    """Let the C library give back now what it keeps of freed memory, wherever it lies: a large block that was freed
    between two small ones stays otherwise, and the next of its size may find no room there.

    >>> give_back()
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


class _Most:
    """What the one heap of this process has been told."""

    nbytes = 0


_most = _Most()


@functools.cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    library = ctypes.CDLL(None)
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
