"""Lists of spans as kernels take them: rows of three words, to where, from where, how many bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from zerokern.core import native

__all__ = ["WORDS", "Span", "by_alignment", "rows_of"]

WORDS = 3
ALIGNMENTS = (16, 4, 2, 1)
Span = tuple[int, int, int]


def rows_of(spans: Sequence[Span] | array[int]) -> array[int]:
    """Returns the rows of some spans; an array is taken to hold them already.

    >>> rows_of([(100, 500, 8), (112, 600, 4)]).tolist()
    [100, 500, 8, 112, 600, 4]
    """
    return spans if isinstance(spans, array) else array("Q", [word for span in spans for word in span])


def by_alignment(rows: array[int]) -> list[tuple[int, array[int]]]:
    """Returns the rows whose addresses are both multiples of 16, of 4, of 2, and the others; where there are any.

    >>> [(alignment, some.tolist()) for alignment, some in by_alignment(array("Q", [32, 16, 5, 6, 2, 9]))]
    [(16, [32, 16, 5]), (2, [6, 2, 9])]
    """
    made, counts = array("Q", bytes(8 * len(rows))), array("q", bytes(8 * len(ALIGNMENTS)))
    where = (one.buffer_info()[0] for one in (rows, made, counts))
    source, target, counted = where
    native.library().zk_sort_spans(source, len(rows) // WORDS, target, counted)
    found, begin = [], 0
    for alignment, count in zip(ALIGNMENTS, counts, strict=True):
        if count:
            found.append((alignment, made[begin : begin + WORDS * count]))
        begin += WORDS * count
    return found
