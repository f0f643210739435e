"""Computes offsets of tensors in one mapping, and keeps track of free spans. Pure arithmetic, without torch.

Planner and allocator use the same functions, so they count the same bytes.

Tensors begin at multiples of a cache line, in order. Streams that are a large power of two apart use the same memory
banks in turn (0.71 ns per parameter for two states of 256 MiB side by side, 0.42 with 16 KiB or more between them), so
a large tensor is followed by a gap of less than a hundredth of its size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from zerokern.core.errors import got

__all__ = ["LINE", "PAGE", "SKEW", "FreeSpans", "nbytes_of", "offsets_of"]

PAGE = 4096  # leases begin and end on it: what O_DIRECT asks of memory, on any disk
LINE = 64
SKEW = 40 << 10  # multiples of it, up to the seventh, are 8 KiB or more apart in every power of two from 64 KiB on


def offsets_of(nbytes: Iterable[int]) -> tuple[list[int], int]:
    """Returns the offset of each tensor, given their sizes, and the end of the last one.

    >>> offsets_of([100, 0, 5])
    ([0, 0, 128], 133)
    >>> offsets_of([8 << 20, 8 << 20])
    ([0, 8429568], 16818176)
    """
    offsets: list[int] = []
    free = end = 0
    for size in nbytes:
        offsets.append(free if size else 0)  # an empty tensor is put at 0, so that it is never beyond the end
        end = free + size if size else end
        free += -(-size // LINE) * LINE + (SKEW if size >= 100 * SKEW else 0)
    return offsets, end


def nbytes_of(nbytes: Iterable[int]) -> int:
    """Returns the size of a mapping for tensors of these sizes, in whole pages.

    >>> nbytes_of([12000, 7]), nbytes_of([])
    (12288, 0)
    """
    _, end = offsets_of(nbytes)
    return -(-end // PAGE) * PAGE


class FreeSpans:
    """The free spans of [0, nbytes). It does not know who holds the others.

    >>> free = FreeSpans(100)
    >>> free.take(30), free.take(30), free.take(50)
    (0, 30, None)
    >>> free.give(0, 30)
    >>> free.rows(), free.total, free.largest
    ([(0, 30), (60, 100)], 70, 40)
    >>> free.give(30, 30)
    >>> free.rows()
    [(0, 100)]
    """

    def __init__(self, nbytes: int) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        if nbytes:
            self.give(0, nbytes)

    def take(self, nbytes: int) -> int | None:
        """Takes the first free nbytes and returns their offset; None if no span is long enough."""
        if nbytes <= 0:
            raise ValueError(got("nbytes", nbytes, "a whole number from 1 on"))
        for i, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= nbytes:
                if end - begin == nbytes:
                    del self._begins[i], self._ends[i]
                else:
                    self._begins[i] = begin + nbytes
                self.total -= nbytes
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Frees [offset, offset + nbytes). Beyond the end of the range, the range grows."""
        end = offset + nbytes
        i = bisect_right(self._begins, offset)  # the first free span that begins behind it
        overlaps = (i > 0 and self._ends[i - 1] > offset) or (i < len(self._begins) and self._begins[i] < end)
        if offset < 0 or nbytes <= 0 or overlaps:
            raise ValueError(
                got("span", (offset, end), "spans of at least one byte that are taken", "This one is partly free")
            )
        joins_before = i > 0 and self._ends[i - 1] == offset
        joins_behind = i < len(self._begins) and self._begins[i] == end
        if joins_before and joins_behind:
            self._ends[i - 1] = self._ends[i]
            del self._begins[i], self._ends[i]
        elif joins_before:
            self._ends[i - 1] = end
        elif joins_behind:
            self._begins[i] = offset
        else:
            self._begins.insert(i, offset)
            self._ends.insert(i, end)
        self.total += nbytes

    @property
    def largest(self) -> int:
        """The length of the longest free span."""
        return max((end - begin for begin, end in self.rows()), default=0)

    def rows(self) -> list[tuple[int, int]]:
        """Returns the free spans as (begin, end), in order; no two of them touch."""
        return list(zip(self._begins, self._ends, strict=True))
