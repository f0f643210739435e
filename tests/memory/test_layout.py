"""Free spans against a model that keeps a flag for every byte."""

from __future__ import annotations

import random

import pytest
from tables import each

from zerokern.memory import FreeSpans

NBYTES = 96


def spans_of(free: list[bool]) -> list[tuple[int, int]]:
    """The maximal runs of True, as (begin, end)."""
    edges = [i for i in range(len(free) + 1) if (i > 0 and free[i - 1]) != (i < len(free) and free[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def first_fit(free: list[bool], nbytes: int) -> int | None:
    return next((begin for begin, end in spans_of(free) if end - begin >= nbytes), None)


@each("seed", range(20))
def test_random_sequences_against_the_model(seed: int) -> None:
    draw = random.Random(seed)
    spans, free, taken = FreeSpans(NBYTES), [True] * NBYTES, []
    for _ in range(400):
        if taken and draw.random() < 0.48:
            offset, nbytes = taken.pop(draw.randrange(len(taken)))
            if nbytes > 1 and draw.random() < 0.3:  # a part comes back, the rest stays
                kept = draw.randrange(1, nbytes)
                taken.append((offset, kept))
                offset, nbytes = offset + kept, nbytes - kept
            spans.give(offset, nbytes)
            free[offset : offset + nbytes] = [True] * nbytes
        else:
            nbytes = draw.randint(1, 24)
            offset = spans.take(nbytes)
            assert offset == first_fit(free, nbytes)
            if offset is not None:
                assert all(free[offset : offset + nbytes])
                free[offset : offset + nbytes] = [False] * nbytes
                taken.append((offset, nbytes))
        assert spans.rows() == spans_of(free)
        assert spans.total == sum(free)
        assert spans.largest == max((end - begin for begin, end in spans_of(free)), default=0)
    for offset, nbytes in taken:
        spans.give(offset, nbytes)
    assert spans.rows() == [(0, NBYTES)]


@each("span", [(0, 5), (4, 2), (9, 1), (9, 11), (12, 4), (15, 10), (19, 2), (-1, 1), (10, 0)])
def test_what_is_free_is_not_given_again(span: tuple[int, int]) -> None:
    spans = FreeSpans(30)
    assert spans.take(20) == 0
    spans.give(0, 10)
    spans.give(15, 3)
    before = spans.rows(), spans.total
    with pytest.raises(ValueError, match="must be spans of at least one byte that are taken"):
        spans.give(*span)
    assert (spans.rows(), spans.total) == before


@each("nbytes", [0, -1])
def test_nothing_cannot_be_taken(nbytes: int) -> None:
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        FreeSpans(10).take(nbytes)
