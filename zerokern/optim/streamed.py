"""Updates rows on a device whose state rests in host memory: it passes through slots there, piece by piece."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.io.pieces import Piece, Segment, Width, plan
from zerokern.io.pieces import columns as columns_of
from zerokern.memory.copies import Copies
from zerokern.optim.binding import Member, TableGroup, set_groups, table_of
from zerokern.optim.matrices import Matrix, is_cut
from zerokern.optim.matrix_table import MatrixTable, SpareMatrix
from zerokern.optim.rounds import rounds_of
from zerokern.optim.state import SpanRow, pointer_words
from zerokern.optim.survey import Groups, Survey
from zerokern.optim.transit import SLOTS, Passed, Transit

__all__ = ["StreamedRows", "parts_in_slot", "pieces_of"]

_PARTS = 64  # of all state, of which one is in a slot: what comes before the first update and after the last is short
_LEAST, _MOST = 256 << 10, 64 << 20  # bytes of a slot
_LEAST_OF_MATRICES = 32 << 20  # their calls take longer than copies of as many bytes


def pieces_of(numels: Sequence[int], widths: Sequence[tuple[Width, ...]]) -> tuple[list[Any], int, int]:
    """Returns the pieces that state of these elements is moved in, how many slots there are, and the bytes of each.

    >>> pieces, slots, nbytes = pieces_of([1 << 20], [(Width(4, 1), Width(4, 1))])
    >>> len(pieces), slots, nbytes
    (32, 4, 262144)
    """
    total = sum(columns_of(mine, numel)[1] for numel, mine in zip(numels, widths, strict=True))
    return _in_slots(plan(numels, widths, _bound(total, _LEAST)))


def whole_pieces(
    matrices: Sequence[Matrix], widths: Sequence[tuple[Width, ...]], turns: Sequence[int] = ()
) -> tuple[list[Any], int, int]:
    """Returns what `pieces_of` does, where the state of a matrix is moved at once: small ones share pieces, cut ones
    have that of a round. A round is of one turn (`turns`: those of the matrices), and the same on all ranks.

    >>> two, matrices = Width(2, 1), [Matrix(0, 32, 8, 4), Matrix(0, 4096 * 2048, 4096, 2048), Matrix(32, 64, 16, 4)]
    >>> [piece.nbytes for piece in whole_pieces(matrices, [(two, Width(4, 1))] * 3)[0]]
    [576, 50331648]
    """
    turns = turns or [0] * len(matrices)
    sizes = [columns_of(mine, one.numel)[1] for one, mine in zip(matrices, widths, strict=True)]
    cut = [(row, one) for row, one in enumerate(matrices) if is_cut(one)]
    uncut = [row for row, one in enumerate(matrices) if not is_cut(one)]
    most = _bound(sum(sizes[row] for row in uncut), _LEAST_OF_MATRICES)
    found: list[list[int]] = []
    room = -1  # in the last piece of small ones, which others go on filling behind a large one
    for row in sorted(uncut, key=turns.__getitem__):
        if sizes[row] > most:
            found.append([row])
            continue
        if sizes[row] > room:
            found.append(small := [])
            room = most
        small.append(row)
        room -= sizes[row]
    for turn in sorted({turns[row] for row, _ in cut}):
        mine = [(row, one, torch.float32) for row, one in cut if turns[row] == turn]
        found += [list(one.rows) for one in rounds_of(mine)]
    pieces = []
    for some in sorted(found, key=lambda some: turns[some[0]]):
        segments, end = [], 0
        for row in some:
            segments.append(Segment(row, matrices[row].start, matrices[row].numel, end))
            end += sizes[row]
        pieces.append(Piece(tuple(segments), end))
    return _in_slots(pieces)


def _bound(total: int, least: int) -> int:
    """Returns how many bytes of state a slot is to have at most, of so many in all."""
    return min(max(-(-total // _PARTS), least), _MOST)


def _in_slots(pieces: list[Piece]) -> tuple[list[Any], int, int]:
    return pieces, min(SLOTS, len(pieces)), max((piece.nbytes for piece in pieces), default=0)


@dataclass
class StreamedPiece:
    """The table of what passes through a slot together.

    `rows`: for each row of it the number of its gradient's address, and the bytes after it.
    """

    table: Any
    groups: list[TableGroup]
    rows: list[tuple[int, int]]


class StreamedRows:
    """Rows whose parameters and gradients are on a device and whose state is in host memory.

    They are updated turn by turn, in the order of the rows: the state of a piece is a batch of the `transit`, whose
    copies pass beside those of other pieces. `beside`: as of a `Transit`.
    """

    def __init__(
        self, link: Copies, place: torch.device, open_table: Callable[[int, int], Any], *, beside: bool = False
    ) -> None:
        self._open_table, self._beside = open_table, beside
        self.transit = Transit(link, place, "slots for state that is updated on the device", beside=beside)
        self.pieces: list[StreamedPiece] = []
        self._turns: list[int] = []  # of each piece, the first of those that have rows in it
        self.spare: SpareMatrix | None = None  # of all pieces
        self.began = False
        self._passed: list[Passed] = []  # what has been launched of the update at hand

    def lay_out(
        self,
        survey: Survey,
        groups: Groups,
        members: Sequence[Member],
        rows: Sequence[SpanRow],
        steps: Sequence[int],
        first: int,
        turns: Sequence[int],
        moved: Sequence[bool],
    ) -> None:
        """Cuts the rows into pieces. `first`: the number of the first one's gradient. `turns`: those of the rows.

        `moved`: whether the state of a row is in host memory; else it lies on the device, and is updated there among
        the others of a round, for ranks need not have the same in host memory.
        """
        self.transit.wait()
        widths = [row.layout.widths if moves else () for row, moves in zip(rows, moved, strict=True)]
        if survey.matrices:
            if not self._beside:  # nobody waits for a turn by itself: rounds have matrices of any
                pairs = zip(members, turns, strict=True)
                turns = [0 if is_cut(place) else turn for (_, place), turn in pairs]
            pieces, *_ = whole_pieces([matrix for _, matrix in members], widths, turns)
        else:
            pieces, *_ = pieces_of([survey.numels[i] for i, _ in members], widths)
        self.transit.lay_out([piece.nbytes for piece in pieces])
        self.pieces = []
        self._turns = [turns[piece.segments[0].span] for piece in pieces]
        for number, piece in enumerate(pieces):
            slot = self.transit.slot(number)
            spans: list[SpanRow] = []
            for segment in piece.segments:
                row, i = rows[segment.span], members[segment.span][0]
                if not moved[segment.span]:
                    spans.append(row)
                    continue
                shift = segment.start * survey.param_dtypes[i].itemsize
                pointers = {row.layout.param_column: survey.param_pointers[i] + shift}
                for column, kept, near in parts_in_slot(row, widths[segment.span], segment, slot):
                    pointers[column] = near.data_ptr()
                    self.transit.add(number, kept, near)
                spans.append(SpanRow(row.layout, row.first, pointer_words(pointers)))
            mine: list[Member] = [(members[segment.span][0], segment) for segment in piece.segments]
            if survey.matrices:
                mine = [members[segment.span] for segment in piece.segments]
            table, made = table_of(survey, groups, mine, spans, steps, self._open_table)
            if isinstance(table, MatrixTable):
                self.spare = table.spare = self.spare or table.spare
                shifts = [0] * len(mine)  # their gradients' addresses are those of the matrices
            else:
                shifts = [segment.start * survey.grad_dtypes[i].itemsize for i, segment in mine]
            numbers = [first + segment.span for segment in piece.segments]
            self.pieces.append(StreamedPiece(table, made, list(zip(numbers, shifts, strict=True))))

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes what the tables' calls read: hyperparameters, step counts, where the gradients are."""
        self.transit.wait()
        self.began, self._passed = False, []
        for piece in self.pieces:
            set_groups(piece.table, piece.groups, settings)
            piece.table.columns["grad"][:] = array("Q", [pointers[number] + shift for number, shift in piece.rows])

    @property
    def is_launched(self) -> bool:
        """Whether the update of all rows has been."""
        return len(self._passed) == len(self.pieces)

    def launch(self, run: Callable[[Any], object], turn: int) -> list[Passed]:
        """Launches the update of the rows up to this turn; `run` launches that of a table on the current stream.

        Returns what it has launched. After an error nothing is under way any more.
        """
        begin, end = len(self._passed), bisect_right(self._turns, turn)
        with self.transit.stream():
            try:
                for number in range(begin, end):
                    self._passed.append(self.transit.launch(number, partial(self._update, number, run)))
            except BaseException:
                self.transit.end()
                raise
        return self._passed[begin:]

    def _update(self, number: int, run: Callable[[Any], object]) -> None:
        table = self.pieces[number].table
        try:
            run(table)
            self.began = True
        finally:
            self.began = self.began or getattr(table, "begun", False)

    def count(self) -> bool:
        """Counts the update that was prepared; returns whether moments have started with it."""
        started = False
        for group in (group for piece in self.pieces for group in piece.groups):
            started = started or group.first
            group.step += 1
            group.first = False
        return started


def parts_in_slot(
    row: SpanRow, widths: Sequence[Width], segment: Any, slot: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the column of each tensor of a row's state, its part in the segment, and that part's place in a slot."""
    offsets, _ = columns_of(tuple(widths), segment.numel)
    end = segment.start + segment.numel
    for kind, kept, (_, per), offset in zip(row.layout.columns, row.tensors, widths, offsets, strict=True):
        part = kept.detach().view(-1)[segment.start // per : -(-end // per)]
        begin = segment.offset + offset
        yield kind.column, part, slot[begin : begin + part.nbytes].view(part.dtype)
