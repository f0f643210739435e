"""Tensors of any strides as runs of bytes, and back: what lies in a file is always row-major and without gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from zerokern.saving.staging import copy
from zerokern.zero.boxes import boxes

__all__ = ["pieces", "place", "runs"]


def pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """The bytes of a tensor in row-major order: where they lie, if contiguous, else copies of at most `most` bytes.

    >>> [piece.tolist() for piece in pieces(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t(), most=2)]
    [[1, 3], [2, 4]]
    """
    tensor = tensor.detach()
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or nbytes <= most or not tensor.ndim:
        yield tensor.contiguous().view(-1).view(torch.uint8)
        return
    step = most * len(tensor) // nbytes
    for row in range(0, len(tensor), max(step, 1)):
        yield from pieces(tensor[row : row + step] if step else tensor[row], most)


def runs(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], row: int) -> Iterator[tuple[int, int]]:
    """Spans (first, numel) of a flat box `sizes` that hold its part at `offsets` of `lengths`, and little else.

    What lies between two rows of at most `row` elements is read as well: that is cheaper than to stop there.

    >>> list(runs((4, 6), (1, 0), (2, 6), row=100)), list(runs((4, 6), (1, 2), (2, 3), row=100))
    ([(6, 12)], [(8, 9)])
    >>> list(runs((4, 6), (1, 2), (2, 3), row=5))
    [(8, 3), (14, 3)]
    """
    if not prod(lengths):
        return
    if not sizes:
        yield 0, 1
        return
    inner = prod(sizes[1:])
    if inner > row and tuple(lengths[1:]) != tuple(sizes[1:]):
        for at in range(offsets[0], offsets[0] + lengths[0]):
            for first, numel in runs(sizes[1:], offsets[1:], lengths[1:], row):
                yield at * inner + first, numel
        return
    stride, first, last = prod(sizes), 0, 0
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        stride //= size
        first += offset * stride
        last += (offset + length - 1) * stride
    yield first, last - first + 1


def place(piece: Tensor, first: int, sizes: Sequence[int], offsets: Sequence[int], target: Tensor) -> None:
    """Copies elements `first` and following of a flat box `sizes` to their places in `target`, its part at `offsets`.

    The version of `target` may stay: whoever gave it away counts it up, once.

    >>> target = torch.zeros(2, 2, dtype=torch.int64)
    >>> place(torch.arange(3, 9), 3, (4, 3), (1, 1), target)
    >>> target
    tensor([[4, 5],
            [7, 8]])
    """
    if target.is_contiguous() and tuple(target.shape[1:]) == tuple(sizes[1:]):
        begin = first - (offsets[0] * prod(sizes[1:]) if sizes else 0)
        if target.device.type == piece.device.type == "cpu":  # not by torch, whose threads would disturb training
            copy(target.data_ptr() + begin * piece.itemsize, piece.data_ptr(), piece.nbytes)
        else:
            target.view(-1)[begin : begin + piece.numel()].copy_(piece)
        return
    for corner, extent, at in boxes(sizes, first, piece.numel()):
        source = piece[at : at + prod(extent)].view(extent)
        into = target
        for dim, (low, length) in enumerate(zip(corner, extent, strict=True)):
            begin = max(low, offsets[dim])
            numel = min(low + length, offsets[dim] + target.shape[dim]) - begin
            if numel <= 0:
                break
            source = source.narrow(dim, begin - low, numel)
            into = into.narrow(dim, begin - offsets[dim], numel)
        else:
            into.copy_(source)
