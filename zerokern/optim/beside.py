"""Updates of parameters that stay on a device: beside one in host memory, or with state from there or from a disk."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.io.pieces import ALIGNMENT, Segment, columns
from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.triton.backend import launching
from zerokern.memory import HostTier
from zerokern.memory import Slot as Cell
from zerokern.optim import device
from zerokern.optim.binding import HostCompute, Member, RowBatch, TableGroup, set_groups, table_of
from zerokern.optim.hosted import HostCopies
from zerokern.optim.matrices import is_cut
from zerokern.optim.matrix_table import MatrixTable
from zerokern.optim.state import SpanRow, StateTier, pointer_words, room_of
from zerokern.optim.streamed import StreamedRows, parts_in_slot
from zerokern.optim.survey import Groups, Survey
from zerokern.optim.transit import SLOTS, Passage, Passed, Transit

__all__ = ["SplitCompute"]


class SplitCompute(HostCompute):
    """Runs the native table, and launches one update of all rows that stay on the device.

    The host decides, and counts steps. The launch is on the current stream: what the program does next to gradients and
    parameters comes after it. State of what stays lies beside it, or in host memory, from which it streams: turn by
    turn, and with "overlap" on a stream of its own, so that the program waits for the turns that it needs alone. Rows
    with state in records, of which all stay or none does, are in the native table in either case; of those that stay
    the device's native code runs it, record by record.
    """

    def __init__(self, host: HostCopies, room: HostTier | None, schedule: object) -> None:
        """`room`: host memory that state lies in."""
        super().__init__()
        assert host.link is not None
        self._place, self._host, self._room = host.driver.device, host, room
        self._last: Any = None  # what a played device has been given: it reads the table when it comes to it
        self._there: Any = None  # the table of what stays, with its state
        self._cut: set[int] = set()  # ids of parameters whose matrices ranks have cut
        self._groups_there: list[TableGroup] = []
        self._open_table = partial(_open_table, self._place)  # no method: a cycle would keep host memory past close()
        self.place, beside = self._place, schedule == "overlap"
        self.streamed = StreamedRows(host.link, self._place, self._open_table, beside=beside)
        # batches whose records are in cells of the ring, one after the other
        name = "slots for state on a disk that is updated on the device"
        self.records = Transit(host.link, self._place, name, beside=beside)
        self._number_of: dict[int, int] = {}  # of a record, by the first of its rows, where they stay
        self._beside_from: list[int] = []  # where in a record's slot state begins that is in host memory
        self._in_records: set[int] = set()  # ids of parameters of which some rows are in records
        self._passed: list[Passed] = []  # what its turn at hand has launched
        self._last_passed: Passed | None = None
        self.launched = self.began = False

    def is_like(self, other: HostCompute) -> bool:
        return isinstance(other, SplitCompute) and other._place == self._place

    def stays(self, param: Tensor) -> bool:
        return device.is_apart(param)

    @property
    def streams(self) -> bool:
        return bool(self.streamed.pieces) or bool(self._number_of)

    @property
    def ring_nbytes(self) -> int:
        return self.streamed.transit.nbytes + self.records.nbytes

    def streams_state_of(self, param: Tensor) -> bool:
        there = room_of(param, self._room) is not None or id(param) in self._cut or id(param) in self._in_records
        return self.streams and self.stays(param) and there

    def bases(self, survey: Survey, batches: Sequence[RowBatch], cells: Sequence[Cell]) -> list[int]:
        params = [survey.params[i] for batch in batches for i, _ in batch.members]
        self._in_records = {id(param) for param in params if self.stays(param)}
        self._number_of = {}
        if not self._in_records:
            self.records.lay_out(())
            self.behind = 0
            return super().bases(survey, batches, cells)
        self.behind = SLOTS - 1  # whoever stores a record waits for its end, and its slot is free again then
        memories, sizes, begin = [], [], 0
        self._beside_from = []
        for number, batch in enumerate(batches):
            self._number_of[begin], begin = number, begin + len(batch.members)
            nbytes = 0 if batch.record is None else batch.record.nbytes
            memories.append(cells[number % len(cells)].lease.tensor(torch.uint8, (nbytes,)) if nbytes else None)
            self._beside_from.append(-(-nbytes // ALIGNMENT) * ALIGNMENT)
            sizes.append(self._beside_from[-1] + sum(self._nbytes_beside(survey, *member) for member in batch.members))
        self.records.lay_out(sizes)
        slots = [self.records.slot(number) for number in range(len(batches))]
        for number, memory in enumerate(memories):
            if memory is not None:
                self.records.add(number, memory, slots[number][: memory.nbytes])
        return [slot.data_ptr() for slot in slots]

    def _nbytes_beside(self, survey: Survey, i: int, place: Any) -> int:
        """Returns the bytes of what a row in a record's batch has in host memory: a cut matrix, whose round waits for
        records."""
        if not is_cut(place) or room_of(survey.params[i], self._room) is None:
            return 0
        return columns(survey.layouts[i].widths, place.numel)[1]

    def lay_out(
        self,
        survey: Survey,
        groups: Groups,
        members: Sequence[Member],
        rows: Sequence[SpanRow],
        turns: Sequence[int] = (),
    ) -> None:
        here = len(members) - len(turns)
        steps = self.book.choose(survey.numbers)
        spare = self.table.spare if isinstance(self.table, MatrixTable) and self._number_of else None
        mine, open_here = list(rows[:here]), self._open_table if self._number_of else UpdateTable
        if self._number_of:
            mine = self._with_state_beside(survey, members[:here], mine)
        self.table, self.groups = table_of(survey, groups, members[:here], mine, steps, open_here)
        pairs = list(zip(members, rows, strict=True))[here:]
        rooms = [room_of(survey.params[i], self._room) for (i, _), _ in pairs]
        moved = [bool(row.layout.columns) and room is not None for (_, row), room in zip(pairs, rooms, strict=True)]
        self._cut = {id(survey.params[i]) for (i, place), _ in pairs if is_cut(place)}
        far = [moves or is_cut(place) for ((_, place), _), moves in zip(pairs, moved, strict=True)]
        order = sorted(range(len(far)), key=far.__getitem__)  # those whose state streams come last
        self._here, self._streams_from = here, here + far.count(False)
        self._order = [*range(here), *(here + at for at in order)]
        members, rows = [pairs[at][0] for at in order], [pairs[at][1] for at in order]
        turns, moved = [turns[at] for at in order], [moved[at] for at in order]
        near = far.count(False)
        self._there, self._groups_there = table_of(survey, groups, members[:near], rows[:near], steps, self._open_table)
        far_ones = members[near:], rows[near:], steps, self._streams_from, turns[near:], moved[near:]
        self.streamed.lay_out(survey, groups, *far_ones)
        if self._number_of and isinstance(self.table, MatrixTable):  # one direction is in memory, of either
            self.table.spare = self.streamed.spare or spare or self.table.spare
            self.streamed.spare = self.table.spare

    def _with_state_beside(self, survey: Survey, members: Sequence[Member], rows: Sequence[SpanRow]) -> list[SpanRow]:
        """Returns the rows of records with the state that they have in host memory where it is in their slots."""
        made, begin = list(rows), 0
        ends = [*list(self._number_of)[1:], len(rows)]
        for number, (at, end) in enumerate(zip(self._beside_from, ends, strict=True)):
            slot = self.records.slot(number)
            for row in range(begin, end):
                i, place = members[row]
                nbytes = self._nbytes_beside(survey, i, place)
                if not nbytes:
                    continue
                old, segment = rows[row], Segment(row, place.start, place.numel, at)
                shift = place.start * survey.param_dtypes[i].itemsize
                pointers = {old.layout.param_column: survey.param_pointers[i] + shift}
                for column, kept, near in parts_in_slot(old, old.layout.widths, segment, slot):
                    pointers[column] = near.data_ptr()
                    self.records.add(number, kept, near)
                made[row] = SpanRow(old.layout, old.first, pointer_words(pointers))
                at += nbytes
            begin = end
        return made

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        pointers = array("Q", map(pointers.__getitem__, self._order))
        self.records.end()  # a played device reads tables when it comes to them
        super().prepare(settings, pointers[: self._here])
        if self._last is not None:
            self._last.wait()
        set_groups(self._there, self._groups_there, settings)
        self._there.columns["grad"][:] = pointers[self._here : self._streams_from]
        self.streamed.prepare(settings, pointers)
        self.launched = self.began = False

    @property
    def launches(self) -> bool:
        return bool(self._groups_there) or self.streams

    def launch(self, scale: float) -> None:
        if self._groups_there:
            self._run(scale)
        self.streamed.transit.begin()
        self.records.begin()
        self.launched, self._passed, self._last_passed = self.streamed.is_launched, [], None

    def launch_turn(self, turn: int, scale: float) -> tuple[Passage, Passage] | None:
        passed, self._passed = self._passed, []
        try:
            passed += self.streamed.launch(partial(self._launch, scale=scale), turn)
        finally:
            self.began = self.began or self.streamed.began
            self.launched = self.streamed.is_launched
        if not passed and self._last_passed is not None:
            passed = [self._last_passed]
        if not passed:
            return None
        first, last = passed[0], passed[-1]
        self._last_passed = last
        return Passage(first.filled, last.updated), Passage(first.emptied, last.emptied)

    def run(self, scale: float, begin: int = 0, end: int | None = None) -> None:
        """Updates these rows; launches their update, with their record, where they stay."""
        if not self._number_of:
            super().run(scale, begin, end)
            return

        def launch() -> None:
            self.began = True
            self._launch(self.table, scale, begin, end)

        with self.records.stream():
            self._passed.append(self.records.launch(self._number_of[begin], launch))

    def leave(self, begin: int) -> None:
        if self._number_of:
            self.records.wait_for(self._number_of[begin])

    def settle(self) -> None:
        if self._number_of:  # what this update has launched writes others, or other elements
            self.records.started.wait()

    @property
    def carried_out(self) -> bool:
        """Of what is launched nobody knows that here."""
        return not self._number_of and super().carried_out

    def may_have_written(self, error: BaseException) -> bool:
        return self.began if self._number_of else super().may_have_written(error)

    def break_off(self) -> None:
        self.records.end()
        super().break_off()

    def _run(self, scale: float) -> None:
        if device.serves(self._place):
            try:
                self._launch(self._there, scale)
            finally:
                self.began = self._there.begun
            return

        self.began = True
        self._last = self._launch(self._there, scale)

    def _launch(self, table: Any, scale: float, *rows: int | None) -> Any:
        """Launches the update of a table, or of some rows of it, on the current stream."""
        if device.serves(self._place):
            with launching(self._place):
                table.run(scale, *rows)
            return None
        # gradients that nobody else may have, until a device that is played has read them
        held = [copy.grad for copy in self._host.copies.values() if copy.stays is not None]
        return self._host.driver.launch(partial(_run_holding, table, held, scale, *rows))

    def put_away(self) -> None:
        self.streamed.transit.wait()

    def count(self, tier: StateTier) -> None:
        started = self.streamed.count()
        for group in self._groups_there:
            started = started or group.first
            group.step += 1
            group.first = False
        if started:
            tier.started()
        super().count(tier)


def _open_table(place: torch.device, nrows: int, ngroups: int) -> Any:
    """Opens a table of the device's kernels; where a device's memory is the host's, one of native calls."""
    if device.serves(place):
        return device.kernels().table(place, nrows, ngroups)
    return UpdateTable(nrows, ngroups)


def _run_holding(table: Any, _: Sequence[Tensor], scale: float, *rows: int | None) -> None:
    table.run(scale, *rows)
