"""What the C library is told to do with freed memory, as it counts what it maps by itself."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
from forked import run_forked

from zerokern.memory.heap import keep_freed, mmap_large_blocks

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
BLOCK = 2 << 20


class Counted(ctypes.Structure):
    """mallinfo2: `hblks` blocks have pages of their own."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def is_mapped() -> bool:
    """Whether a block gets pages of its own. It stays: what is free already serves the next, whatever was told."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype, library.malloc.restype = Counted, ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    before = library.mallinfo2().hblks
    library.malloc(BLOCK)
    return bool(library.mallinfo2().hblks > before)


def told_in_turn() -> None:
    assert keep_freed(64 << 20) and not is_mapped()
    assert mmap_large_blocks() and is_mapped(), "a small model kept what it freed: the next, that is short, does not"
    assert keep_freed(1 << 20) and not is_mapped(), "and another that is not short"
    assert keep_freed(0) and not is_mapped()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_who_is_told_last_counts() -> None:
    ran = run_forked(Path(__file__).read_text())
    assert ran.returncode == 0, ran.stderr


if __name__ == "__main__":
    told_in_turn()
