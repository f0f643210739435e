"""Room in files: no two extents overlap, what is freed can be taken again, and nothing is lost on the way."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from tables import each

from zerokern import BackendError
from zerokern.io.space import APART, Extent, Extents

ALIGN = 4096


def check(extents: Extents, taken: list[Extent], lengths: list[int]) -> None:
    """Taken and free spans tile the files."""
    free = [(begin // APART, begin % APART, end % APART) for begin, end in extents._free.rows()]
    spans = sorted([(one.file, one.offset, one.offset + one.nbytes) for one in taken] + free)
    for file, length in enumerate(lengths):
        own = [(begin, end) for number, begin, end in spans if number == file]
        assert sum(end - begin for begin, end in own) == length - length % extents.align
        assert all(end == begin for (_, end), (begin, _) in pairwise(own))
    assert extents.nbytes - extents.free_nbytes == sum(one.nbytes for one in taken)
    assert all(one.offset % extents.align == 0 == one.nbytes % extents.align for one in taken)


@each("align", [ALIGN, 16 * ALIGN])
@each("seed", range(5))
def test_random_use_never_overlaps(align: int, seed: int) -> None:
    chance = random.Random(seed)
    extents, taken, lengths = Extents(align), [], []
    for step in range(400):
        what = chance.random()
        if what < 0.03 or not lengths:
            lengths.append(chance.randrange(1, 60) * ALIGN)
            extents.grow(len(lengths) - 1, lengths[-1])
        elif what < 0.06:
            lengths[-1] += chance.randrange(40) * ALIGN
            extents.grow(len(lengths) - 1, lengths[-1])
        elif what < 0.6:
            nbytes = chance.randrange(1, 12 * ALIGN)
            largest = extents.largest
            found = extents.take(nbytes)
            assert (found is not None) == (extents.capacity(nbytes) <= largest)
            taken += [found] if found else []
        elif taken:
            extents.give(taken.pop(chance.randrange(len(taken))))
        if step % 10 == 0:
            check(extents, taken, lengths)
    for one in taken:
        extents.give(one)
    check(extents, [], lengths)
    assert extents.largest == max(length - length % align for length in lengths)


@each("seed", range(5))
def test_files_that_exist_are_taken_over(seed: int) -> None:
    """As a durable store does: the same room is free as before."""
    chance = random.Random(seed)
    before, lengths = Extents(ALIGN), [40 * ALIGN, 70 * ALIGN + 5]
    for file, length in enumerate(lengths):
        before.grow(file, length)
    taken = [one for _ in range(60) if (one := before.take(chance.randrange(1, 4 * ALIGN)))]
    chance.shuffle(taken)
    for one in taken[: len(taken) // 2]:
        before.give(one)
    kept = taken[len(taken) // 2 :]
    after = Extents(ALIGN)
    after.claim(lengths, kept)
    check(after, kept, lengths)
    assert after._free.rows() == before._free.rows()


def test_files_of_another_disk_are_refused() -> None:
    with pytest.raises(BackendError, match="multiples of 8192"):
        Extents(2 * ALIGN).claim([40 * ALIGN], [Extent(0, ALIGN, 2 * ALIGN)])


def test_the_first_room_that_fits_is_taken() -> None:
    extents = Extents(ALIGN)
    extents.grow(0, 10 * ALIGN)
    held = [extents.take(2 * ALIGN) for _ in range(5)]
    extents.give(held[3])
    extents.give(held[1])
    assert extents.take(1) == Extent(0, 2 * ALIGN, ALIGN)
    assert extents.take(2 * ALIGN) == held[3]
    assert extents.take(2 * ALIGN) is None and extents.take(ALIGN) == Extent(0, 3 * ALIGN, ALIGN)
