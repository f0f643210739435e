"""Memory that every contestant shares: same alignment, same pages, touched before anything is timed."""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE_NBYTES = 2 << 20


class Buffers:
    """Flat tensors by role and dtype. Whoever asks for the same role and dtype gets the same memory."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._tensors: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}

    def take(self, role: str, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        numel = self.numel if numel is None else numel
        key = (role, dtype, numel)
        if key not in self._tensors:
            self._tensors[key] = huge_tensor(numel, dtype)
        return self._tensors[key]


def huge_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor that starts on a huge page and asks for huge pages."""
    nbytes = max(1, numel) * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE_NBYTES
    return raw[start : start + nbytes].view(dtype)[:numel].zero_()


def huge_page_setting() -> str:
    """What the kernel does about huge pages: always, madvise, never or unknown."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return file.read().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "unknown"
