"""The truth of sums of squares on a device: the orders in which the GPU kernels add, in plain torch.

A chunk's or a tile's sum is the work of one program; the sums of a launch are added by whichever program ends last, in
one order whoever that is. So the same list gives the same bits in every run, on every GPU, at any alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.kernels import reference

__all__ = ["columns", "moved_sumsq", "sumsq"]

COLUMNS = 1024
TILE_ROWS = 16
ROW_NBYTES = 2048


def sumsq(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements in float64.

    Chunks of 65536 elements are summed as `reference.sumsq` sums them; the chunks of all tensors of one dtype are added
    by `columns`; then the dtypes, in the order in which they appear.

    >>> sumsq([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
    169.0
    """
    total = 0.0
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [t.reshape(-1) for t in tensors if t.dtype == dtype and t.numel()]
        total += columns([reference.sumsq([chunk]) for t in chosen for chunk in t.split(reference.SUMSQ_CHUNK)])
    return total


def moved_sumsq(written: Sequence[Tensor], itemsize: int) -> float:
    """The sum of the squares of what one launch of flatten or unflatten wrote for contiguous tensors.

    `itemsize` is that of the wider dtype of the two. A row is 2048 bytes of it and a tile 16 rows, from the start of
    each tensor. Position j of a row adds its squares of each row of the tile in order, then pairs of positions are
    added, j + (j + 1), as a tree; the tiles of all tensors are added by `columns`.

    >>> moved_sumsq([torch.ones(3), torch.full((2,), 2.0)], 4)
    11.0
    """
    width = ROW_NBYTES // itemsize
    return columns([_tile(t, width) for one in written for t in one.reshape(-1).split(TILE_ROWS * width) if t.numel()])


def columns(sums: Sequence[float]) -> float:
    """Column j of 1024 adds the sums j, j + 1024, ... in order; then the columns are added as a tree, j + (j + 512),
    then 256 and so on to 1.

    >>> columns([1.0, 2.0, 3.0])
    6.0
    """
    padded = torch.tensor([*sums] + [0.0] * (-len(sums) % COLUMNS), dtype=torch.float64).view(-1, COLUMNS)
    total = torch.zeros(COLUMNS, dtype=torch.float64)
    for row in padded:
        total = total + row
    while total.numel() > 1:
        first, second = total.chunk(2)
        total = first + second
    return total.item()


def _tile(values: Tensor, width: int) -> float:
    squares = values.double() * values.double()
    positions = torch.zeros(width, dtype=torch.float64)
    for row in torch.nn.functional.pad(squares, (0, -squares.numel() % width)).view(-1, width):
        positions = positions + row
    while positions.numel() > 1:
        positions = positions[::2] + positions[1::2]
    return positions.item()
