"""Packs spans with columns (optimizer state on disk) into records that each fit a slot of the ring.

Pure arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zerokern.core.units import BLOCK, Piece

__all__ = ["ALIGNMENT", "PAGE", "Content", "Width", "columns", "plan"]

ALIGNMENT = 64
PAGE = 4096
_LEAST_SHARE = 8  # a span is cut only where at least this fraction of a slot is filled by what is cut off


class Width(NamedTuple):
    """The size of a column: `nbytes` for every `per` elements, rounded up."""

    nbytes: int
    per: int


Content = tuple[tuple[Piece, ...], int]
"""What one record holds, of which spans, and its bytes. Each piece begins at a multiple of 128; its columns lie at its
offset."""


@lru_cache(maxsize=4096)
def columns(widths: tuple[Width, ...], numel: int) -> tuple[tuple[int, ...], int]:
    """Returns the offset of each column within a span's bytes, and the bytes of all columns.

    >>> columns((Width(4, 1), Width(4, 128)), 300)
    ((0, 1216), 1280)
    """
    offsets, end = [], 0
    for width in widths:
        offsets.append(end)
        end += _rounded_up(-(-numel // width.per) * width.nbytes, ALIGNMENT)
    return tuple(offsets), end


def plan(
    numels: Sequence[int], widths: Sequence[tuple[Width, ...]], slot_nbytes: int, *, cuts: bool = True
) -> list[Content]:
    """Plans records of at most `slot_nbytes` that hold the columns of all spans, in order.

    Small spans share a record, large ones are split; without `cuts` all must be small. Records are whole pages, so that
    they need no bounce buffer.

    >>> plan([100, 1000], [(Width(4, 1),)] * 2, 4096)[0]
    ((Piece(param=0, start=0, numel=100, offset=0), Piece(param=1, start=0, numel=896, offset=448)), 4096)
    """
    records: list[Content] = []
    segments: list[Piece] = []
    used = 0
    for span, (numel, mine) in enumerate(zip(numels, widths, strict=True)):
        start = 0
        while mine and start < numel:
            count = _within(mine, numel - start, slot_nbytes - used)
            enough = cuts and count and columns(mine, count)[1] * _LEAST_SHARE >= slot_nbytes
            worthwhile = count == numel - start or enough
            if segments and not worthwhile:
                records.append((tuple(segments), _rounded_up(used, PAGE)))
                segments, used = [], 0
                continue
            if not count or not (cuts or worthwhile):
                what = BLOCK if cuts else numel
                raise ValueError(f"a slot of {slot_nbytes} B cannot hold the state of {what} elements")
            segments.append(Piece(span, start, count, used))
            used += columns(mine, count)[1]
            start += count
    return [*records, (tuple(segments), _rounded_up(used, PAGE))] if segments else records


def _within(widths: tuple[Width, ...], numel: int, nbytes: int) -> int:
    """Returns how many of `numel` elements fit in `nbytes`: all, or a multiple of 128."""
    if columns(widths, numel)[1] <= nbytes:
        return numel
    block = sum(BLOCK // width.per * width.nbytes for width in widths)
    slack = sum(ALIGNMENT for width in widths if width.per > 1)
    return min(max(nbytes - slack, 0) // block, (numel - 1) // BLOCK) * BLOCK


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
