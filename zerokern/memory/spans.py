"""Which spans of a flat range are free: first fit, neighbours joined. Of memory or of files alike; torch-free."""

from __future__ import annotations

from bisect import bisect_right

from zerokern.core.errors import got

__all__ = ["FreeSpans"]


class FreeSpans:
    """The free spans of [0, nbytes). Who holds the others is not known here.

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
        """The offset of nbytes that are now taken, the first that fit; None where no span is long enough."""
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
        """Frees [offset, offset + nbytes); beyond the end of what there was, the range grows."""
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
        """The free spans as (begin, end), in order; no two of them touch."""
        return list(zip(self._begins, self._ends, strict=True))
