"""Divides state on disk into records, and says what of a parameter's state lies in which.

Where elements are updated by themselves a record holds all tensors of some. A matrix is updated in two passes: averages
move and become a direction, of all of the matrix, before the direction changes parameters, masters and remainders. So
a matrix has all its state in one record, perhaps with others; or, if it is too large, records for the first pass and
then records for the second. Each is read once and written once, and one direction at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from zerokern.core.errors import got
from zerokern.io.pieces import PAGE, Width, columns, plan
from zerokern.kernels.reference import SUMSQ_CHUNK
from zerokern.memory.stream import Record
from zerokern.optim.formats import Layout, Slot, widths_of

__all__ = ["LEAST_SLOT", "Content", "RecordCut", "RecordSpan", "records_of"]

LEAST_SLOT = 4 * SUMSQ_CHUNK  # bytes: the fp32 averages whose squares are summed together


class RecordCut(NamedTuple):
    """What a record holds of a parameter: `slots` of `numel` elements from `start` on, at `offset` of the record.

    `span`: the number of the parameter. `averages`, `applies`: which passes over a matrix update it.
    """

    span: int
    start: int
    numel: int
    offset: int
    slots: tuple[Slot, ...]
    averages: bool = True
    applies: bool = True


class Content(NamedTuple):
    """What one record holds."""

    cuts: tuple[RecordCut, ...]
    nbytes: int


class RecordSpan:
    """Says where the state of a span of one parameter lies within a record. `widths`: of its slots."""

    __slots__ = ("applies", "averages", "begun", "numel", "offset", "record", "slots", "start", "widths")

    def __init__(self, record: Record, cut: RecordCut) -> None:
        self.record, self.slots, self.widths = record, cut.slots, widths_of(cut.slots)
        self.start, self.numel, self.offset = cut.start, cut.numel, cut.offset
        self.averages, self.applies = cut.averages, cut.applies
        self.begun = False
        record.unsettled.add(self)

    @property
    def offsets(self) -> list[int]:
        """Where in its record each tensor's part begins, in bytes."""
        return [self.offset + offset for offset in columns(self.widths, self.numel)[0]]


def records_of(spans: Sequence[tuple[int, Layout]], slot_nbytes: int) -> list[Content]:
    """Returns the records, of at most `slot_nbytes`, that hold the state of parameters of so many elements, in order.

    >>> from zerokern.optim import AdamW, Muon
    >>> import torch
    >>> of = lambda kind: kind._algorithm.layout({"split": 1, "master_format": None, "state_format": "fp32",
    ...     "stochastic_seed": None}, torch.bfloat16)
    >>> for record in records_of([(100_000, of(Muon))], 1 << 19):
    ...     print([([slot.key for slot in cut.slots], cut.start, cut.numel) for cut in record.cuts], record.nbytes)
    [(['momentum_buffer'], 0, 100000)] 401408
    [(['remainder'], 0, 100000)] 200704
    """
    made: list[Content] = []
    for by_matrix, some in groupby(range(len(spans)), key=lambda number: spans[number][1].matrices > 0):
        numbers = list(some)
        if by_matrix:
            made += _of_matrices(numbers, spans, slot_nbytes)
        else:
            made += _packed([(number, 0, *spans[number]) for number in numbers], slot_nbytes, cuts=True)
    return made


_Part = tuple[int, int, int, Layout]
"""The number of a parameter, and of its state from which element on how many, with their layout."""


def _packed(parts: Sequence[_Part], slot_nbytes: int, *, cuts: bool) -> Iterator[Content]:
    """Yields records that hold all tensors of these, side by side."""
    numels, widths = [numel for _, _, numel, _ in parts], [layout.widths for *_, layout in parts]
    for piece in plan(numels, widths, slot_nbytes, cuts=cuts):
        found = []
        for segment in piece.segments:
            number, start, _, layout = parts[segment.span]
            found.append(RecordCut(number, start + segment.start, segment.numel, segment.offset, layout.columns))
        yield Content(tuple(found), piece.nbytes)


def _of_matrices(numbers: Sequence[int], spans: Sequence[tuple[int, Layout]], slot_nbytes: int) -> Iterator[Content]:
    parts: list[_Part] = []
    for number in numbers:
        numel, layout = spans[number]
        if numel % layout.matrices:
            raise ValueError(got("split", layout.matrices, f"a number that divides {numel}, a parameter's elements"))
        each = numel // layout.matrices
        parts += [(number, start, each, layout) for start in range(0, numel, each or 1)]
    fits = lambda part: columns(part[3].widths, part[2])[1] <= slot_nbytes  # noqa: E731
    for small, some in groupby(parts, key=fits):
        if small:
            yield from _packed(list(some), slot_nbytes, cuts=False)
        else:
            for part in some:
                yield from _of_large(part, slot_nbytes)


def _of_large(part: _Part, slot_nbytes: int) -> Iterator[Content]:
    """Yields the records of one matrix: of its averages, cut where sums of squares are, then of all else."""
    number, start, numel, layout = part
    averages = tuple(slot for slot in layout.columns if slot.column.startswith("exp_avg"))
    others = tuple(slot for slot in layout.columns if slot not in averages)
    for begin, count, nbytes in _pieces(averages, numel, slot_nbytes):
        cuts = [RecordCut(number, start + begin, count, 0, averages, applies=False)]
        if not others and begin + count == numel:
            cuts.append(RecordCut(number, start, numel, 0, (), averages=False))
        yield Content(tuple(cuts), nbytes)
    for begin, count, nbytes in _pieces(others, numel, slot_nbytes) if others else ():
        yield Content((RecordCut(number, start + begin, count, 0, others, averages=False),), nbytes)


def _pieces(slots: Sequence[Slot], numel: int, slot_nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields where pieces of these tensors that fit begin, their elements and their bytes, in whole pages."""
    widths: tuple[Width, ...] = widths_of(slots)
    most = numel if columns(widths, numel)[1] <= slot_nbytes else 0
    while most < numel and columns(widths, most + SUMSQ_CHUNK)[1] <= slot_nbytes:
        most += SUMSQ_CHUNK
    for begin in range(0, numel, most):
        count = min(most, numel - begin)
        yield begin, count, -(-columns(widths, count)[1] // PAGE) * PAGE
