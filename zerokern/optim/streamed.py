"""Updates rows on a device whose state rests in host memory: it passes through slots there, piece by piece."""

from __future__ import annotations

import contextlib
import operator
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.io.pieces import Piece, Segment, Width, plan
from zerokern.io.pieces import columns as columns_of
from zerokern.memory import DeviceTier, Wanted
from zerokern.memory.copies import Copies, Copy
from zerokern.optim.binding import Member, TableGroup, set_groups, table_of
from zerokern.optim.cut_matrices import CutMatrix, rounds_of
from zerokern.optim.formats import TAKES_LESS
from zerokern.optim.matrices import Matrix, MatrixTable, SpareMatrix
from zerokern.optim.state import SpanRow, pointer_words
from zerokern.optim.survey import Groups, Survey

__all__ = ["SLOTS", "Passage", "Passed", "StreamedRows", "parts_in_slot", "pass_through", "pieces_of"]

SLOTS = 4  # one is filled, one updated, one emptied; one more, so that none of them waits for another
_PARTS = 64  # of all state, of which one is in a slot: what comes before the first update and after the last is short
_LEAST, _MOST = 256 << 10, 64 << 20  # bytes of a slot
_LEAST_OF_MATRICES = 32 << 20  # their calls take longer than copies of as many bytes
_AHEAD = 4 * SLOTS  # pieces that the host has launched and that have not ended


def pieces_of(numels: Sequence[int], widths: Sequence[tuple[Width, ...]]) -> tuple[list[Any], int, int]:
    """Returns the pieces that state of these elements is moved in, how many slots there are, and the bytes of each.

    >>> pieces, slots, nbytes = pieces_of([1 << 20], [(Width(4, 1), Width(4, 1))])
    >>> len(pieces), slots, nbytes
    (32, 4, 262144)
    """
    total = sum(columns_of(mine, numel)[1] for numel, mine in zip(numels, widths, strict=True))
    return _in_slots(plan(numels, widths, _bound(total, _LEAST)))


def whole_pieces(
    matrices: Sequence[Matrix | CutMatrix], widths: Sequence[tuple[Width, ...]], turns: Sequence[int] = ()
) -> tuple[list[Any], int, int]:
    """Returns what `pieces_of` does, where the state of a matrix is moved at once: small ones share pieces, cut ones
    have that of a round. A round is of one turn (`turns`: those of the matrices), and the same on all ranks.

    >>> two, matrices = Width(2, 1), [Matrix(0, 8, 4), Matrix(0, 4096, 2048), Matrix(32, 16, 4)]
    >>> [piece.nbytes for piece in whole_pieces(matrices, [(two, Width(4, 1))] * 3)[0]]
    [576, 50331648]
    """
    turns = turns or [0] * len(matrices)
    sizes = [columns_of(mine, one.numel)[1] for one, mine in zip(matrices, widths, strict=True)]
    cut = [(row, one) for row, one in enumerate(matrices) if isinstance(one, CutMatrix)]
    uncut = [row for row, one in enumerate(matrices) if not isinstance(one, CutMatrix)]
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
    """What passes through a slot together: tensors in host memory and where they lie in the slot, and their table.

    `rows`: for each row of the table the number of its gradient's address, and the bytes after it.
    """

    resting: list[Tensor]
    there: list[Tensor]
    table: Any
    groups: list[TableGroup]
    rows: list[tuple[int, int]]


class Passage:
    """The ticket of copies and launches that come one after the other: it ends with the last of them.

    >>> class Ended:
    ...     def __init__(self, begin, end): self._times = begin, end
    ...     def times(self): return self._times
    >>> Passage(Ended(1, 2), Ended(5, 7)).times()
    (1, 7)
    """

    def __init__(self, first: Copy, last: Copy) -> None:
        self._first = first
        self.last = last

    def wait(self) -> None:
        """Waits on the host."""
        self.last.wait()

    def done(self) -> bool:
        """Whether all of it has ended."""
        return self.last.done()

    def gate(self) -> None:
        """Makes the current stream wait."""
        self.last.gate()

    def times(self) -> tuple[int, int] | None:
        """Returns when the first began and the last ended, where the device's marks know that."""
        first, last = self._first.times(), self.last.times()
        return None if first is None or last is None else (first[0], last[1])


class Passed(NamedTuple):
    """What was launched for state that passes through a slot: its way there, its update, its way back."""

    filled: Copy
    updated: Copy
    emptied: Copy


def pass_through(
    link: Copies,
    resting: Sequence[Tensor],
    there: Sequence[Tensor],
    run: Callable[[], object],
    *,
    ready: Copy | None,
    after: Copy | None = None,
    checked: bool = False,
) -> Passed:
    """Launches state's way from host memory to a slot, what `run` launches on the current stream, and the way back.

    Where that fails, nothing of it is under way any more.
    """
    filled = link.to_device(resting, there, ready=ready, after=after, checked=checked)
    try:
        filled.gate()
        run()
        updated = link.here()
        return Passed(filled, updated, link.to_host(there, resting, ready=updated, checked=checked))
    except BaseException:
        with contextlib.suppress(Exception):
            filled.wait()
        raise


class StreamedRows:
    """Rows whose parameters and gradients are on a device and whose state is in host memory.

    They are updated turn by turn, in the order of the rows: the state of a piece is copied to a slot, updated there,
    and copied back, beside those of other pieces. A slot is written again when it has been read. `beside`: updates run
    on a stream of their own, which does not wait for what the program launches after `begin`; else on the current one.
    """

    def __init__(
        self, link: Copies, place: torch.device, open_table: Callable[[int, int], Any], *, beside: bool = False
    ) -> None:
        self._link, self._open_table, self._beside = link, open_table, beside
        self._tier = DeviceTier(place, "slots for state that is updated on the device", TAKES_LESS)
        self.slots: list[Tensor] = []
        self.pieces: list[StreamedPiece] = []
        self._turns: list[int] = []  # of each piece, the first of those that have rows in it
        self._last: Copy | None = None  # the end of the last update
        self._checked = False  # whether the copies have been
        self.spare: SpareMatrix | None = None  # of all pieces
        self.began = False
        # of the update at hand: what it comes after, and what has been launched
        self._start: Copy | None = None
        self._ready: Copy | None = None
        self._passed: list[Passed] = []

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
        self.wait()
        widths = [row.layout.widths if moves else () for row, moves in zip(rows, moved, strict=True)]
        if survey.matrices:
            if not self._beside:  # nobody waits for a turn by itself: rounds have matrices of any
                pairs = zip(members, turns, strict=True)
                turns = [0 if isinstance(place, CutMatrix) else turn for (_, place), turn in pairs]
            pieces, count, nbytes = whole_pieces([matrix for _, matrix in members], widths, turns)
        else:
            pieces, count, nbytes = pieces_of([survey.numels[i] for i, _ in members], widths)
        if len(self.slots) != count or (self.slots and self.slots[0].nbytes != nbytes):
            self.slots = []  # before others are made, which the device clears first
            self._last = None
            self.slots = self._tier.lay_out([Wanted("ring", torch.Size([nbytes]), torch.uint8)] * count)
        self.pieces, self._checked = [], False
        self._turns = [turns[piece.segments[0].span] for piece in pieces]
        for number, piece in enumerate(pieces):
            slot = self.slots[number % count]
            resting: list[Tensor] = []
            there: list[Tensor] = []
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
                    resting.append(kept)
                    there.append(near)
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
            self.pieces.append(StreamedPiece(resting, there, table, made, list(zip(numbers, shifts, strict=True))))

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes what the tables' calls read: hyperparameters, step counts, where the gradients are."""
        self.wait()
        self.began, self._passed = False, []
        for piece in self.pieces:
            set_groups(piece.table, piece.groups, settings)
            piece.table.columns["grad"][:] = array("Q", [pointers[number] + shift for number, shift in piece.rows])

    def begin(self) -> None:
        """Begins the update that was prepared: it comes after what the current stream has been given."""
        self._start = self._link.here()
        self._ready = self._start if self._last is None else self._last  # slots and state are as the last one left them

    @property
    def is_launched(self) -> bool:
        """Whether the update of all rows has been."""
        return len(self._passed) == len(self.pieces)

    def launch(self, run: Callable[[Any], object], turn: int) -> list[Passed]:
        """Launches the update of the rows up to this turn; `run` launches that of a table on the current stream.

        Returns what it has launched. On the program's stream the host waits if it is far ahead. After an error nothing
        is under way any more.
        """
        begin, end = len(self._passed), bisect_right(self._turns, turn)
        with self._link.driver.aside("update") if self._beside else contextlib.nullcontext():
            if self._beside and begin == 0 and end:
                assert self._start is not None
                self._start.gate()
            try:
                for number in range(begin, end):
                    self._launch(number, run)
            except BaseException:
                for one in self._passed:
                    with contextlib.suppress(Exception):
                        one.emptied.wait()
                raise
        self._checked = self._checked or (bool(self.pieces) and self.is_launched)
        return self._passed[begin:]

    def _launch(self, number: int, run: Callable[[Any], object]) -> None:
        piece, count, passed = self.pieces[number], len(self.slots), self._passed
        free = passed[number - count].emptied if number >= count else None

        def update() -> None:
            try:
                run(piece.table)
                self.began = True
            finally:
                self.began = self.began or getattr(piece.table, "begun", False)

        ready, checked = self._ready, self._checked
        passed.append(
            pass_through(self._link, piece.resting, piece.there, update, ready=ready, after=free, checked=checked)
        )
        self._last = passed[-1].emptied
        if number >= _AHEAD and not self._beside:
            passed[number - _AHEAD].emptied.wait()

    def wait(self) -> None:
        """Returns once all state is in host memory again."""
        if self._last is not None:
            self._last.wait()

    def count(self) -> bool:
        """Counts the update that was prepared; returns whether moments have started with it."""
        started = False
        for group in (group for piece in self.pieces for group in piece.groups):
            started = started or group.first
            group.step += 1
            group.first = False
        return started

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(map(operator.attrgetter("nbytes"), self.slots))


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
