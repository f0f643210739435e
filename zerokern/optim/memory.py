"""Zeroed memory for optimizer state: one private mapping for many tensors, on huge pages where there are any."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.memory.room import refuse_beyond

HUGE_PAGE = 2 << 20
ALIGNMENT = 64
# Streams that lie a large power of two apart take turns on the same banks of memory: 0.71 ns per parameter for two
# states of 256 MiB side by side, 0.42 with 16 KiB or more between them.
LARGE, SKEW = 4 << 20, 80 << 10


def counters(count: int) -> tuple[Tensor, list[Tensor]]:
    """`count` >= 1 float32 zeros: all of them as one tensor, and each as a 0-dim tensor with a storage of its own.

    >>> flat, each = counters(3)
    >>> _ = flat.add_(1); each[2]
    tensor(1.)
    """
    buffer = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    each = [torch.frombuffer(buffer, dtype=torch.float32, count=1, offset=4 * i).view(()) for i in range(count)]
    return torch.frombuffer(buffer, dtype=torch.float32), each


def zeros(wanted: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """One zeroed tensor per shape and dtype, in this order in memory, each with a storage of its own size.

    Its own size, because saving a tensor saves its storage. Private, because a forked worker must not share it.

    >>> [tensor.shape for tensor in zeros([(torch.Size([3]), torch.float32), (torch.Size([]), torch.int8)])]
    [torch.Size([3]), torch.Size([])]
    """
    offsets, end = [], 0
    for shape, dtype in wanted:
        offsets.append(end)
        nbytes = math.prod(shape) * dtype.itemsize
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT + (SKEW if nbytes >= LARGE else 0)
    if end == 0:
        return [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in wanted]
    slack = HUGE_PAGE if end >= HUGE_PAGE else 0
    if slack:  # beyond a control group's limit the system grants all, and ends the process when it is touched
        refuse_beyond(end, "optimizer state")
    try:
        buffer = mmap.mmap(-1, end + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"optimizer state needs {end + slack} bytes of host memory: {error}") from error
    if slack:
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages keeps small ones
            buffer.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(buffer, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE if slack else 0
    return [_cut(buffer, start + offset, shape, dtype) for offset, (shape, dtype) in zip(offsets, wanted, strict=True)]


def _cut(buffer: mmap.mmap, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    numel = math.prod(shape)
    if numel == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset).view(shape)
