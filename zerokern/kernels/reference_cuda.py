"""The truth of the kernels in cuda/: gather and scatter between a list of tensors and one bucket, in plain torch.

The arithmetic is that of `reference.cast`; what is defined here besides is the order of the sum of squares. It follows
from the bucket alone: 16 bytes of it are a group, 256 groups a row, 4 rows a tile. In a tile, thread t adds the squares
of the groups t of the rows 0 to 3, element by element; the threads are added as a tree, lane[j] + lane[j + 128], then
64, 32, ... 1. Of the tiles, lane j of 256 adds those of number j, j + 256, ... in order; then the same tree. Elements
of the bucket that belong to no tensor count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.kernels import reference

__all__ = ["gather", "scatter", "sumsq"]

THREADS, GROUPS, GROUP_NBYTES = 256, 4, 16


def gather(
    tensors: Sequence[Tensor],
    bucket: Tensor,
    *,
    offsets: Sequence[int],
    scale: float = 1.0,
    stats: Tensor | None = None,
) -> None:
    """bucket[o : o + n] = cast(F(scale) * tensor) for each tensor and its offset o; stats of what was written.

    >>> bucket, stats = torch.zeros(4), torch.empty(2, dtype=torch.float64)
    >>> gather([torch.ones(2), torch.ones(1)], bucket, offsets=[0, 3], scale=3.0, stats=stats)
    >>> bucket.tolist(), stats.tolist()
    ([3.0, 3.0, 0.0, 3.0], [27.0, 0.0])
    """
    squares = torch.zeros(bucket.numel(), dtype=torch.float64)
    for tensor, offset in zip(tensors, offsets, strict=True):
        span = bucket[offset : offset + tensor.numel()]
        reference.cast(tensor.reshape(-1), span, scale=scale)
        squares[offset : offset + tensor.numel()] = span.double() ** 2
    _report(squares, bucket.itemsize, stats)


def scatter(
    bucket: Tensor,
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int],
    scale: float = 1.0,
    stats: Tensor | None = None,
) -> None:
    """tensor = cast(F(scale) * bucket[o : o + n]) for each tensor and its offset o; stats of what was written.

    >>> tensors = [torch.empty(2), torch.empty(1)]
    >>> scatter(torch.tensor([1.0, 2.0, 0.0, 3.0]), tensors, offsets=[0, 3]); tensors
    [tensor([1., 2.]), tensor([3.])]
    """
    squares = torch.zeros(bucket.numel(), dtype=torch.float64)
    for tensor, offset in zip(tensors, offsets, strict=True):
        reference.cast(bucket[offset : offset + tensor.numel()].view(tensor.shape), tensor, scale=scale)
        squares[offset : offset + tensor.numel()] = tensor.reshape(-1).double() ** 2
    _report(squares, bucket.itemsize, stats)


def sumsq(squares: Tensor, itemsize: int) -> float:
    """The sum of float64 squares, one for each element of a bucket with that itemsize, in the order defined above.

    >>> sumsq(torch.tensor([1.0, 4.0], dtype=torch.float64), 4)
    5.0
    """
    group = GROUP_NBYTES // itemsize
    tile = THREADS * GROUPS * group
    tiles = torch.nn.functional.pad(squares, (0, -squares.numel() % tile)).view(-1, GROUPS, THREADS, group)
    lanes = torch.zeros(tiles.shape[0], THREADS, dtype=torch.float64)
    for row in range(GROUPS):
        for i in range(group):
            lanes = lanes + tiles[:, row, :, i]
    sums = torch.nn.functional.pad(_tree(lanes), (0, -tiles.shape[0] % THREADS)).view(-1, THREADS)
    total = torch.zeros(1, THREADS, dtype=torch.float64)
    for row in range(sums.shape[0]):
        total = total + sums[row]
    return float(_tree(total))


def _tree(lanes: Tensor) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _report(squares: Tensor, itemsize: int, stats: Tensor | None) -> None:
    if stats is not None:
        total = sumsq(squares, itemsize)
        stats[0], stats[1] = total, float(total - total != 0.0)
