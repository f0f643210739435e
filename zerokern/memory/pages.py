"""Moves huge pages between address ranges, so that pages that one range no longer needs are reused by the next.

A page that was returned to the system comes back as zeros, which the system has to write; on a virtual machine its host
may have taken it away: 0.3 GB/s where a disk reads 2 (`bench/FACTS.md`). Moving a page costs one system call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from ctypes import c_int, c_long, c_size_t, c_void_p

import torch

from zerokern.memory.arena import HUGE_PAGE, never_unmap

__all__ = ["Pages", "on_huge_pages", "reserve"]

_NOTHING, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10  # Python 3.13 has a name for the former
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, _DONTUNMAP: to an address that we chose, and the old one stays ours
_LIBC = ctypes.PyDLL(None, use_errno=True)  # short calls, many of them: with the lock of the interpreter
_FAILED = -1  # of calls that return an address, of which 32 bits tell that it is one


def on_huge_pages(fresh: torch.Tensor) -> torch.Tensor:
    """Asks for huge pages where they fit into the memory of a tensor that nobody has touched yet; returns the tensor.

    >>> on_huge_pages(torch.empty(1 << 20)).shape
    torch.Size([1048576])
    """
    first = -fresh.data_ptr() % HUGE_PAGE
    whole = (fresh.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if whole > 0:
        _LIBC.madvise(c_void_p(fresh.data_ptr() + first), c_size_t(whole), mmap.MADV_HUGEPAGE)  # advice
    return fresh


def reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """Reserves addresses without memory; returns the mapping and the offset of its first huge page."""
    slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    mapping = mmap.mmap(-1, nbytes + slack, flags=_PRIVATE)
    os.register_at_fork(after_in_child=functools.partial(never_unmap, weakref.ref(mapping)))
    start = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    _disappear(start, nbytes + slack)
    return mapping, -start % HUGE_PAGE if slack else 0


def _disappear(address: int, nbytes: int) -> None:
    """Replaces whatever is mapped at these addresses by one reservation without memory."""
    where, size = c_void_p(address), c_size_t(nbytes)
    if _LIBC.mmap(where, size, _NOTHING, _PRIVATE | _MAP_FIXED, c_int(-1), c_long(0)) == _FAILED:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    _LIBC.madvise(where, size, mmap.MADV_HUGEPAGE)  # advice
    _LIBC.madvise(where, size, mmap.MADV_DONTFORK)


class Pages:
    """A stock of huge pages for reuse, at most `most_nbytes`; what is more is returned to the system.

    >>> pages = Pages(1 << 30)
    >>> mapping, skip = reserve(HUGE_PAGE)
    >>> start = torch.frombuffer(mapping, dtype=torch.uint8, count=1, offset=skip).data_ptr()
    >>> pages.give(start, HUGE_PAGE)  # there were none: memory is new
    0
    >>> _ = ctypes.memset(start, 7, HUGE_PAGE)
    >>> pages.take(start, HUGE_PAGE); pages.nbytes
    2097152
    >>> pages.give(start, HUGE_PAGE), ctypes.string_at(start, 1)
    (2097152, b'\\x07')
    """

    def __init__(self, most_nbytes: int = 0) -> None:
        self.most_nbytes = most_nbytes
        self._full: list[int] = []  # addresses at which one lies, of those that were reserved for it
        self._empty: list[int] = []
        self._mappings: list[mmap.mmap] = []
        self._can_move = True

    @property
    def nbytes(self) -> int:
        return len(self._full) * HUGE_PAGE

    def take(self, address: int, nbytes: int) -> None:
        """Takes the pages at these addresses into stock; the addresses stay reserved without memory."""
        for page in range(address, address + nbytes - HUGE_PAGE + 1, HUGE_PAGE):
            if self.nbytes + HUGE_PAGE > self.most_nbytes or not self._can_move:
                break
            if not self._empty:
                mapping, skip = reserve(HUGE_PAGE)
                self._mappings.append(mapping)
                self._empty.append(torch.frombuffer(mapping, dtype=torch.uint8, count=1, offset=skip).data_ptr())
            if not self._move(page, self._empty[-1]):
                break
            self._full.append(self._empty.pop())
        _disappear(address, nbytes)

    def give(self, address: int, nbytes: int) -> int:
        """Backs these addresses with memory, first with pages from stock. Returns how many bytes come from stock, with
        their old content; the others are zeros. Raises OSError if there is no memory."""
        given = 0
        while self._full and given + HUGE_PAGE <= nbytes:
            page = self._full.pop()  # before it moves: Ctrl-C may come at any line
            if not self._move(page, address + given):
                self._full.append(page)
                break
            self._empty.append(page)
            given += HUGE_PAGE
        rest = nbytes - given
        if rest and _LIBC.mprotect(c_void_p(address + given), c_size_t(rest), _ALL):
            error = OSError(ctypes.get_errno(), f"mprotect of {rest} bytes: {os.strerror(ctypes.get_errno())}")
            _disappear(address, nbytes)
            raise error
        return given

    def drop(self) -> None:
        """Gives all pages back to the system."""
        while self._full:
            self._empty.append(self._full.pop())
            _disappear(self._empty[-1], HUGE_PAGE)

    def _move(self, source: int, target: int) -> bool:
        """Moves one page. One at a time, because addresses side by side may belong to several mappings."""
        size = c_size_t(HUGE_PAGE)
        if _LIBC.mremap(c_void_p(source), size, size, _MOVE, c_void_p(target)) == _FAILED:
            # no memory: a cap counts what is moved twice, and whoever asked does without; else this system cannot
            self._can_move = ctypes.get_errno() == errno.ENOMEM
            return False
        _LIBC.mprotect(c_void_p(source), size, _NOTHING)
        return True
