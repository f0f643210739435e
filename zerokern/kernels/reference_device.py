"""The truth of sums of squares, and of bits, on a device: the orders in which the GPU kernels add, in plain torch.

A chunk's or a tile's sum is the work of one program; the sums of a launch are added by whichever program ends last, in
one order whoever that is. So the same list gives the same bits in every run, on every GPU, at any alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokern.kernels import reference

__all__ = ["columns", "fingerprint", "moved_sumsq", "sumsq"]

COLUMNS = 1024
TILE_ROWS = 16
ROW_NBYTES = 2048
WORD = (1 << 32) - 1
PIECE = 1 << 18  # elements at a time


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


def fingerprint(tensor: Tensor) -> Tensor:
    """The sum of 32 bits of each element, as int64 where the tensor is.

    x = (bits + i * 0x9E3779B1) * 0x85EBCA6B; x = (x ^ x >> 16) * 0xC2B2AE35; x ^ x >> 15, modulo 2 ** 32. Any other
    element gives another x, and where an edit is the same number in each of them, as a power of two is to exponents,
    what it adds to the x differs.

    >>> one = torch.arange(600.0)
    >>> [int(fingerprint(one)) == int(fingerprint(other)) for other in (one.clone(), one.flip(0), -one, one * 2)]
    [True, False, False, False]
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for begin, some in zip(range(0, flat.numel(), PIECE), flat.split(PIECE), strict=False):
        x = some.view(torch.int16 if some.itemsize == 2 else torch.int32).to(torch.int64)
        x &= (1 << 8 * some.itemsize) - 1
        x += torch.arange(begin, begin + x.numel(), device=x.device).mul_(0x9E3779B1)
        x = x.bitwise_and_(WORD).mul_(0x85EBCA6B).bitwise_and_(WORD)
        x = (x ^ x >> 16).mul_(0xC2B2AE35).bitwise_and_(WORD)
        total += (x ^ x >> 15).sum()
    return total


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
