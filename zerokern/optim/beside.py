"""Updates parameters on a device while the host decides: with state there, in host memory, or on a disk."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.core.units import Piece
from zerokern.io.pieces import ALIGNMENT, Content
from zerokern.io.pieces import columns as columns_of
from zerokern.kernels.reference_table import host_table
from zerokern.kernels.triton.backend import launching
from zerokern.memory import HostTier
from zerokern.memory import Slot as Cell
from zerokern.memory.copies import Copy
from zerokern.optim import device
from zerokern.optim.compute import Member, RowTable
from zerokern.optim.hosted import HostCopies
from zerokern.optim.matrices import is_cut
from zerokern.optim.state import Row, pointer_words, room_of
from zerokern.optim.survey import Groups, Survey
from zerokern.optim.transit import SLOTS, Passage, RowBatch, Transit, pieces_of, whole_pieces

__all__ = ["Beside"]


class Beside:
    """Rows that a device updates, of which the host decides whether they are, and counts their steps.

    Those of `resident` have their state beside them, and are launched at once, on the current stream: what the program
    does next to gradients and parameters comes after it. State of those of `passing` passes through slots on the
    device: in batches of `pieces` from host memory, turn by turn; in batches of `records` from a ring that a disk
    fills, each as the ring comes to it. With "overlap" both have a stream of their own, so that the program waits for
    the turns that it needs alone.
    """

    def __init__(self, host: HostCopies, room: HostTier | None, schedule: object, algorithm: str) -> None:
        """`room`: host memory that state lies in. `algorithm`: the rule."""
        assert host.link is not None
        self.place, self._host, self._room = host.driver.device, host, room
        # no method: a cycle would keep host memory past close()
        open_table = partial(_open_table, self.place, algorithm)
        self.resident, self.passing = RowTable(open_table), RowTable(open_table)
        self._in_turns = schedule == "overlap"  # else nobody waits for a turn by itself
        name = "slots for state that is updated on the device"
        self.pieces = Transit(host.link, self.place, name, beside=self._in_turns)
        name = "slots for state on a disk that is updated on the device"
        self.records = Transit(host.link, self.place, name, beside=self._in_turns)
        self._record_ends: list[int] = []  # of each record, where in its slot state begins that is in host memory
        self._ends: list[int] = []  # the rows of `passing` that records end with, then those that pieces do
        self._turns: list[int] = []  # of each piece, the first of those that have rows in it
        self._moving: set[int] = set()  # ids of parameters in `passing`
        self._last: Any = None  # what a played device has been given: it reads the table when it comes to it
        self._passed: list[tuple[Passage, Copy]] = []  # by the turn at hand, behind the last of those before
        self._told = 0  # how many of these are of an earlier turn
        self._launched = 0  # pieces
        self.began = self._resident_is_launched = False

    def stays(self, param: Tensor) -> bool:
        """Whether a parameter is updated here."""
        return device.is_apart(param)

    @property
    def passes_records(self) -> bool:
        """Whether records pass to the device: all of them do, or none does."""
        return bool(self._record_ends)

    @property
    def moves(self) -> bool:
        """Whether state passes to the device and back."""
        return bool(self._ends)

    def moves_state_of(self, param: Tensor) -> bool:
        """Whether that of this parameter does."""
        return id(param) in self._moving

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the device that state passes through."""
        return self.pieces.nbytes + self.records.nbytes

    @property
    def behind(self) -> int:
        """How many batches of the ring are launched before the first of them is waited for."""
        return SLOTS - 1 if self.passes_records else 0  # whoever stores one waits for it, and its slot is free then

    def place_records(self, survey: Survey, batches: Sequence[RowBatch], cells: Sequence[Cell]) -> list[int]:
        """Gives the batches of the ring their slots, if they pass to the device; returns where their records lie then.

        `cells`: of the ring.
        """
        self._record_ends = []
        if not any(self.stays(survey.params[i]) for batch in batches for i, _ in batch.members):
            self.records.lay_out(())
            return []
        sizes = []
        for batch in batches:
            nbytes = 0 if batch.record is None else batch.record.nbytes
            self._record_ends.append(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            sizes.append(self._record_ends[-1] + sum(self._nbytes_beside(survey, *one) for one in batch.members))
        self.records.lay_out(sizes)
        for number, batch in enumerate(batches):
            if batch.record is not None and batch.record.nbytes:
                memory = cells[number % len(cells)].lease.tensor(torch.uint8, (batch.record.nbytes,))
                self.records.add(number, memory, self.records.slot(number)[: memory.nbytes])
        return [self.records.slot(number).data_ptr() for number in range(len(batches))]

    def _nbytes_beside(self, survey: Survey, i: int, place: Any) -> int:
        """Returns the bytes of what a row in a record's batch has in host memory: a cut matrix, whose round waits for
        records."""
        if not is_cut(place) or room_of(survey.params[i], self._room) is None:
            return 0
        return columns_of(survey.layouts[i].widths, place.numel)[1]

    def lay_out(
        self,
        survey: Survey,
        groups: Groups,
        batches: Sequence[RowBatch],
        rows: Sequence[Row],
        staying: Sequence[tuple[int, Member, Row]],
        steps: Sequence[int],
    ) -> None:
        """Puts rows into the tables: those of batches that pass from the ring, and others (turn, member, row)."""
        members: list[Member] = []
        passing: list[Row] = []
        self._ends = []
        for number, batch in enumerate(batches):
            at = self._record_ends[number]
            for (i, place), row in zip(batch.members, rows[batch.begin : batch.end], strict=True):
                nbytes = self._nbytes_beside(survey, i, place)
                if nbytes:
                    row = _in_slot(self.records, number, survey, i, row, Piece(0, place.start, place.numel, at))
                passing.append(row)
                at += nbytes
            members += batch.members
            self._ends.append(batch.end)
        near: list[tuple[Member, Row]] = []
        far: list[tuple[int, Member, Row, bool]] = []
        for turn, member, row in staying:
            moves = bool(row.layout.columns) and room_of(survey.params[member[0]], self._room) is not None
            if moves or is_cut(member[1]):
                far.append((turn, member, row, moves))
            else:
                near.append((member, row))
        self.resident.lay_out(survey, groups, [one for one, _ in near], [row for _, row in near], steps)
        self.pieces.wait()
        pieces = self._cut(survey, far)
        self.pieces.lay_out([nbytes for _, nbytes in pieces])
        self._turns = [far[segments[0].param][0] for segments, _ in pieces]
        for number, (segments, _) in enumerate(pieces):
            for segment in segments:
                _, (i, place), row, moves = far[segment.param]
                members.append((i, place if survey.matrices else segment))
                passing.append(_in_slot(self.pieces, number, survey, i, row, segment) if moves else row)
            self._ends.append(len(passing))
        self._moving = {id(survey.params[i]) for i, _ in members}
        self.passing.lay_out(survey, groups, members, passing, steps)

    def _cut(self, survey: Survey, far: Sequence[tuple[int, Member, Row, bool]]) -> list[Content]:
        """Cuts rows into pieces. State that does not move lies on the device, and is updated there among the others of
        a round: ranks need not have the same in host memory."""
        widths = [row.layout.widths if moves else () for _, _, row, moves in far]
        if not survey.matrices:
            return pieces_of([survey.numels[i] for _, (i, _), *_ in far], widths)[0]
        turns = [turn if self._in_turns or not is_cut(place) else 0 for turn, (_, place), *_ in far]
        return whole_pieces([place for _, (_, place), *_ in far], widths, turns)[0]

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes what the tables' runs read, which nothing of the last update reads any more."""
        self.records.end()
        self.pieces.wait()
        if self._last is not None:
            self._last.wait()
        self.began = self._resident_is_launched = False
        self._passed, self._told, self._launched = [], 0, 0
        self.resident.prepare(settings, pointers)
        self.passing.prepare(settings, pointers)

    @property
    def launches(self) -> bool:
        """Whether the update has something to launch."""
        return bool(self.resident.groups) or self.moves

    @property
    def is_launched(self) -> bool:
        """Whether all has been launched but what comes from the ring."""
        return self._resident_is_launched and self._launched == len(self._turns)

    def launch(self, scale: float) -> None:
        """Launches the update of resident rows; that of others begins."""
        if self.resident.groups:
            self._last = self._launch(self.resident.table, scale)
        self.pieces.begin()
        self.records.begin()
        self._resident_is_launched = True

    def launch_turn(self, turn: int, scale: float) -> tuple[Passage, Passage] | None:
        """Launches the pieces up to this turn.

        Returns tickets of the turn's update and of its state's way back, or of the last turn's that had any. After an
        error no piece is under way any more.
        """
        end = bisect_right(self._turns, turn)
        if self._launched < end:
            with self.pieces.stream():
                try:
                    for number in range(self._launched, end):
                        self._pass(self.pieces, number, len(self._record_ends) + number, scale)
                        self._launched = number + 1
                except BaseException:
                    self.pieces.end()
                    raise
        if not self._passed:
            return None
        first, last = self._passed[min(self._told, len(self._passed) - 1)], self._passed[-1]
        self._passed, self._told = [last], 1
        return Passage(first[0].first, last[0].last), Passage(first[1], last[1])

    def launch_record(self, number: int, scale: float) -> None:
        """Launches the update of a batch of the ring, with its record."""
        with self.records.stream():
            self._pass(self.records, number, number, scale)

    def _pass(self, transit: Transit, number: int, batch: int, scale: float) -> None:
        begin = self._ends[batch - 1] if batch else 0
        run = partial(self._launch, self.passing.table, scale, begin=begin, end=self._ends[batch])
        self._passed.append(transit.launch(number, run))

    def _launch(self, table: Any, scale: float, **rows: int) -> Any:
        """Launches the update of a table, or of some rows of it, on the current stream."""
        if device.serves(self.place):
            try:
                with launching(self.place):
                    table.run(scale, **rows)
            finally:
                self.began = self.began or table.begun
            return None
        self.began = True
        # gradients that nobody else may have, until a device that is played has read them
        held = [copy.grad for copy in self._host.copies.values() if copy.stays is not None]
        return self._host.driver.launch(partial(_run_holding, table, held, scale, **rows))

    def put_away(self) -> None:
        """Returns once state in host memory is there again."""
        self.pieces.wait()

    def break_off(self) -> None:
        """Ends an update that goes no further."""
        self.records.end()
        self.passing.break_off()

    def count(self) -> bool:
        """Counts the update that was prepared; returns whether moments have started with it."""
        started = self.resident.count()
        return self.passing.count() or started


def _in_slot(transit: Transit, number: int, survey: Survey, i: int, row: Row, segment: Piece) -> Row:
    """Adds the row's state in a segment to a batch; returns the row of the segment, with its state in the slot."""
    layout, slot = row.layout, transit.slot(number)
    begin, end = segment.start, segment.start + segment.numel
    pointers = {layout.param_column: survey.param_pointers[i] + begin * layout.param_dtype.itemsize}
    offsets, _ = columns_of(layout.widths, segment.numel)
    for kind, kept, (_, per), offset in zip(layout.columns, row.tensors, layout.widths, offsets, strict=True):
        part = kept.detach().view(-1)[begin // per : -(-end // per)]
        there = slot[segment.offset + offset :][: part.nbytes].view(part.dtype)
        transit.add(number, part, there)
        pointers[kind.column] = there.data_ptr()
    return Row(layout, row.first, pointer_words(pointers))


def _open_table(place: torch.device, algorithm: str, nrows: int, ngroups: int) -> Any:
    """Opens a table of the device's kernels; where a device's memory is the host's, one of native calls."""
    if device.serves(place):
        return device.kernels().table(place, nrows, ngroups)
    return host_table(algorithm)(nrows, ngroups)


def _run_holding(table: Any, _: Sequence[Tensor], scale: float, **rows: int) -> None:
    table.run(scale, **rows)
