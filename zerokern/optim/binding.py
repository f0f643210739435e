"""Joins a survey to optimizer state and to the native table of pointers: the one binding of every tier.

Rows of the table lie in batches. A batch is fetched from where its state and parameters rest, updated by a native call,
and stored again, while others are on their way in and out. In memory both are the identity, and all rows are one batch.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import KernelError
from zerokern.io.pieces import Segment
from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.formats import POINTERS
from zerokern.memory import Rest, Ring, flowing
from zerokern.memory import Slot as Cell
from zerokern.memory.ring import DeferredSignals
from zerokern.optim import checks
from zerokern.optim.matrices import ns_dtype_of, parts_in_rows
from zerokern.optim.matrix_table import MatrixTable
from zerokern.optim.outside import WatchedState, Witness, tracked
from zerokern.optim.records import RecordSpan
from zerokern.optim.rounds import in_rounds
from zerokern.optim.state import SpanRow, StateTier, StepBook
from zerokern.optim.survey import Groups, Survey, same_objects
from zerokern.schedule.recorder import Recorder, UpdateRecorder
from zerokern.zero.kinds import rest_of

__all__ = ["Binding", "HostCompute", "RowBatch", "table_of"]

Member = tuple[int, Any]
"""A row: the parameter's place in the survey, and the `RecordSpan`, `Segment` or `Matrix` that it is; None: all of a
parameter in memory."""
Turns = Sequence[Sequence[int | Segment]]
"""Places among an optimizer's parameters that are updated one after the other, or segments of them."""
_AHEAD = 2  # batches of resting parameters in memory at once, where no state passes through a ring: one is on its way


@dataclass
class TableGroup:
    """Rows that share formats, hyperparameters and step count."""

    owner: int  # the param_group
    formats: dict[str, Any]
    step: int  # updates made so far, or, where the host does not know it, a label of all that have made as many
    first: bool


def table_of(
    survey: Survey,
    groups: Groups,
    members: Sequence[Member],
    rows: Sequence[SpanRow],
    steps: Sequence[int],
    open_table: Callable[[int, int], Any] = UpdateTable,
) -> tuple[Any, list[TableGroup]]:
    """Makes the table of all rows; those that differ in format, owner or step count are in different groups of it."""
    made: list[TableGroup] = []
    numbers: dict[tuple[Any, ...], int] = {}
    group_of = array("Q")
    for row, (i, _) in zip(rows, members, strict=True):
        owner, grad_dtype, step = survey.owners[i], survey.grad_dtypes[i], steps[i]
        key = (owner, id(row.layout), grad_dtype, step, row.first)
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(made)
            formats = row.layout.table_formats(groups[owner]["stochastic_seed"])
            made.append(TableGroup(owner, {**formats, "grad_dtype": grad_dtype}, step, row.first))
        group_of.append(number)
    if survey.matrices:
        table: Any = MatrixTable(open_table, parts_in_rows((survey.matrices[i], place) for i, place in members))
    else:
        table = open_table(len(rows), len(made))
    table.columns["group"][:] = group_of
    numels = (survey.numels[i] if place is None else place.numel for i, place in members)
    table.columns["numel"][:] = array("Q", numels)
    table.columns["key"][:] = array("Q", [survey.numbers[i] for i, _ in members])
    firsts = [survey.firsts[i] for i, _ in members]
    table.columns["first"][:] = array("Q", map(operator.add, firsts, map(_start_of, members)))
    for name, words in zip(POINTERS, zip(*(row.words for row in rows), strict=True), strict=bool(rows)):
        table.columns[name][:] = array("Q", words)
    return table, made


def _start_of(member: Member) -> int:
    """Returns the element of the survey's parameter that a row begins with."""
    return 0 if member[1] is None else int(member[1].start)


def set_groups(table: Any, groups: Sequence[TableGroup], settings: Sequence[dict[str, Any]]) -> None:
    """Writes hyperparameters and step counts into a table whose steps the host counts."""
    for number, group in enumerate(groups):
        hyper = {**settings[group.owner], "step": group.step + 1, "first_step": group.first}
        if isinstance(hyper["lr"], Tensor):
            hyper["lr"] = checks.number("lr", float(hyper["lr"]))
        table.set_group(number, hyper, **group.formats)


class HostCompute:
    """Runs the native table in host memory, and counts the steps of its parameters."""

    def __init__(self) -> None:
        self.table: Any = None
        self.groups: list[TableGroup] = []
        self.book: Any = None
        # whether what stays on the device has been launched, as far as there is anything, and whether any of it was
        self.launched, self.began = True, False
        self.place = torch.device("cpu")  # where it multiplies matrices
        self.behind = 0  # `run` has returned from so many batches more before one of them has been updated

    def is_like(self, other: HostCompute) -> bool:
        """Whether rows and counters of the other one are of use here."""
        return type(other) is type(self)

    def launching(self) -> AbstractContextManager[Any]:
        """The context that state and tables are made in."""
        return nullcontext()

    def check_new(self, survey: Survey, groups: Groups, tier: StateTier, new: Sequence[int]) -> None:
        """Refuses state that cannot begin now for these parameters of the survey."""

    def mark_first(self, survey: Survey, tier: StateTier, new: Sequence[int]) -> None:
        """Marks rows whose moments have not started, though their tensors are there."""

    def open_book(self, survey: Survey, tier: StateTier, previous: Binding | None) -> None:
        """Counts steps of all parameters; `previous`: whose book fits, for nothing has changed since."""
        entries = [tier.state.get(param, {}) for param in survey.all_params]
        self.book = StepBook(entries) if previous is None else previous.compute.book

    def lay_out(
        self,
        survey: Survey,
        groups: Groups,
        members: Sequence[Member],
        rows: Sequence[SpanRow],
        turns: Sequence[int] = (),
    ) -> None:
        """Puts the rows into a table. `turns`: of the last of them, those that stay and have no state in records."""
        self.table, self.groups = table_of(survey, groups, members, rows, self.book.choose(survey.numbers))

    def is_outdated(self) -> bool:
        """Whether the table must be laid out anew."""
        return False

    def stays(self, param: Tensor) -> bool:
        """Whether a parameter and its state stay on the device, and are updated by `launch`."""
        return False

    @property
    def launches(self) -> bool:
        """Whether the update has something to launch."""
        return False

    @property
    def streams(self) -> bool:
        """Whether `launch_turn` copies state to the device and back."""
        return False

    def streams_state_of(self, param: Tensor) -> bool:
        """Whether it does so with the state of this parameter."""
        return False

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the device that it passes through."""
        return 0

    def bases(self, survey: Survey, batches: Sequence[RowBatch], cells: Sequence[Cell]) -> list[int]:
        """Returns for each batch the address of its record while it is updated: in the cell of the ring, or wherever
        it passes from there."""
        leases = [cells[number % len(cells)].lease for number in range(len(batches))]
        return [0 if lease is None else lease.ptr for lease in leases]

    def leave(self, begin: int) -> None:
        """Returns once the batch that begins with this row has been updated, and its record is in its cell."""

    def settle(self) -> None:
        """Returns once the host may read parameters of rows in records."""

    def launch(self, scale: float) -> None:
        """Launches the update of what stays on the device beside its state, once; that of the rest begins."""

    def launch_turn(self, turn: int, scale: float) -> Any:
        """Launches a turn of the update of what stays on the device and whose state streams there.

        Returns tickets of the update and of the state's way back, if there is any.
        """

    def put_away(self) -> None:
        """Returns once state that was on the device is where it rests."""

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes what the native call reads: hyperparameters, step counts, where the gradients are."""
        set_groups(self.table, self.groups, settings)
        self.table.columns["grad"][:] = pointers

    def run(self, scale: float, begin: int = 0, end: int | None = None) -> None:
        """Updates these rows."""
        self.table.run(scale, begin, end)

    @property
    def carried_out(self) -> bool:
        """Whether the last call was made, even if an interrupt hid that it was."""
        return bool(self.table.carried_out)

    def may_have_written(self, error: BaseException) -> bool:
        """Whether rows may have been written by a call that raised and was not carried out.

        A native call refuses before it writes any row, and a Ctrl-C comes before it or after it. Whole matrices take
        several calls each.
        """
        if isinstance(self.table, MatrixTable):
            return self.table.begun
        return isinstance(error, Exception) and not isinstance(error, KernelError)

    def break_off(self) -> None:
        """Frees what an update holds that goes no further."""
        if isinstance(self.table, MatrixTable):
            self.table.break_off()

    def count(self, tier: StateTier) -> None:
        """Counts the update that was prepared."""
        if tier.begins_without_rows or any(group.first for group in self.groups):
            tier.started()
        for group in self.groups:
            group.step += 1
            group.first = False
        self.book.advance()

    def shown(self, state: Mapping[Any, Any], binding: Binding) -> Mapping[Any, Any]:
        """Returns the state to save."""
        return state


@dataclass
class RowBatch:
    """Rows [begin, end) of the table, which are updated together: those of one record, or of parameters that rest in
    one place. `members`: for each of them."""

    record: Any
    turns: list[int] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    params: list[Rest] = field(default_factory=list)
    """where the parameters rest that are fetched for it"""
    gradients: list[Rest] = field(default_factory=list)
    """where their gradients do, in the step at hand"""

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts what several turns share to the first of them, and last there, next to the batches of the second."""
        return min(self.turns), self.record is None, max(self.turns)


class Binding:
    """Updates a survey's parameters. It is valid as long as the survey is and `intact` says so.

    `tier`: where state rests. `compute`: what runs the native table.
    """

    def __init__(
        self,
        survey: Survey,
        groups: Groups,
        tier: StateTier,
        compute: HostCompute,
        *,
        previous: Binding | None,
        witness: Witness | None,
    ) -> None:
        """Checks all state, then makes what is missing and points at it.

        `previous` is an intact binding of the same state, whose rows need no second look.
        """
        self.survey, self.tier, self.compute, self._groups = survey, tier, compute, groups
        self.begun = False  # whether anything of the last update that was prepared may have been made
        self.turns: Turns = [survey.numbers]
        self.recorder: Recorder | None = None  # notes what is fetched and stored
        self._names: Sequence[str] = ("all",)
        self._updated = self._taken = 0  # batches, in the update at hand: made, and begun
        self._notes: UpdateRecorder | None = None
        self._done = self._is_laid_out = False
        self._ns_dtypes: list[Any] = []  # by group, where matrices are updated, as of the rows
        self._flow: Generator[int, None, None] | None = None
        self._fetched: list[Rest] = []
        with compute.launching():
            new = tier.find(survey, None if previous is None else previous.tier)
            if new:
                compute.check_new(survey, groups, tier, new)
                tier.add(groups, new)
                compute.mark_first(survey, tier, new)
            same = previous is not None and same_objects(survey.all_params, previous.survey.all_params)
            compute.open_book(survey, tier, previous if same and not new else None)
            if witness is not None:
                witness.catch_up(tier.state)
            self.witness = Witness(tracked(tier.state))
            tier.locate()
            if tier.state.mark.changed:
                tier.state.watch_all()
            if not tier.streams:  # else the first update lays out the rows, when its turns are known
                self._lay_out()

    @property
    def moves(self) -> bool:
        """Whether an update fetches and stores state or parameters."""
        return self.tier.streams or self.survey.rests

    @property
    def streams(self) -> bool:
        """Whether state is elsewhere during an update, until `put_away` has returned."""
        return self.tier.streams or self.compute.streams

    def intact(self, state: WatchedState) -> bool:
        """Whether every state tensor is the one, and lies where, the table points at.

        What was assigned to the state shows by its mark, a tensor whose memory was exchanged (`.data`) by its address.
        """
        known = state is self.tier.state and not state.mark.changed
        return known and self.tier.in_place() and self.compute.book.untouched()

    def arrange(self, turns: Turns, names: Sequence[str]) -> None:
        """Prepares for an update turn by turn: each has the parameters in these places of the optimizer's.

        `names`: of their spans in the step program.
        """
        self._names = names
        if turns != self.turns:
            self.turns, self._is_laid_out = turns, False

    def _lay_out(self) -> None:
        """Puts the rows into batches in the order of the turns, and all of them into the table."""
        survey, tier = self.survey, self.tier
        self._batches = batches = self._batches_of()
        self._ring = tier.ring or Ring.without_memory(_AHEAD)
        cells = self._ring.slots
        rows: list[SpanRow] = []
        members = [member for batch in batches for member in batch.members]
        for batch, base in zip(batches, self.compute.bases(survey, batches, cells), strict=True):
            batch.begin = len(rows)
            rows += [tier.row(i, place, base) for i, place in batch.members]
            batch.end = len(rows)
        stays = [i for i in range(len(survey.params)) if self._stays(i)]
        staying = [(i, place) for i in stays for place in (survey.matrices[i] if survey.matrices else (None,))]
        turn_of = {number: turn for turn, some in enumerate(self.turns) for number in some}
        turns = [turn_of.get(survey.numbers[i], 0) for i, _ in staying]
        staying = [staying[at] for at in sorted(range(len(staying)), key=turns.__getitem__)]
        members += staying
        rows += [tier.row(i, place, 0) for i, place in staying]
        index = [i for i, _ in members]
        self._shifts = [_start_of(member) * survey.grad_dtypes[member[0]].itemsize for member in members]
        self._index = None if index == list(range(len(survey.params))) and not any(self._shifts) else index
        self._firsts = [min(batch.turns) for batch in batches]
        self._ends = list(accumulate(self._firsts.count(turn) for turn in range(len(self.turns))))
        self.compute.lay_out(survey, self._groups, members, rows, sorted(turns))
        self._is_laid_out = True

    def _stays(self, i: int) -> bool:
        """Whether a parameter is updated on the device, and passes nothing that comes from the disk."""
        return self.compute.stays(self.survey.params[i]) and not self.tier.has_records_of(i)

    def _batches_of(self) -> list[RowBatch]:
        survey = self.survey
        found: dict[Any, RowBatch] = {}
        for i, turn, segment in self._in_turns():
            if self._stays(i):
                continue
            rest = rest_of(survey.params[i]) if survey.rests else None
            for place in self._places_of(i, segment):
                record = place.record if isinstance(place, RecordSpan) else None
                key = (turn, id(rest)) if record is None else record
                batch = found.get(key)
                if batch is None:
                    batch = found[key] = RowBatch(record)
                batch.turns.append(turn)
                batch.members.append((i, place))
                if rest is not None and rest not in batch.params:
                    batch.params.append(rest)
        batches = sorted(found.values(), key=operator.attrgetter("order"))
        if not self.tier.streams or not survey.matrices:
            return batches
        dtypes = [ns_dtype_of(self._ns_dtypes[owner], self.compute.place) for owner in survey.owners]
        return in_rounds(batches, survey.matrices, dtypes)

    def _places_of(self, i: int, segment: Segment | None) -> Sequence[Any]:
        """Returns what of a parameter are rows of their own; what updates whole matrices has no segments."""
        return self.tier.places(i) if segment is None else (segment,)

    def _in_turns(self) -> list[tuple[int, int, Segment | None]]:
        """Returns all parameters of the survey, each with its turn, or once for each segment, with that one's."""
        at: dict[int, list[tuple[int, Segment | None]]] = {}
        for turn, members in enumerate(self.turns):
            for one in members:
                number, segment = (one, None) if isinstance(one, int) else (one.span, one)
                at.setdefault(number, []).append((turn, segment))
        numbers = enumerate(self.survey.numbers)
        return [(i, turn, segment) for i, number in numbers for turn, segment in at.get(number, [(0, None)])]

    def on_disk(self, turn: int) -> dict[str, int]:
        """Returns the bytes that a turn fetches and stores, as fields of its span. It is known once prepared.

        What several turns share is that of the first of them.
        """
        if not self.moves:
            return {}
        batches = [batch for batch, first in zip(self._batches, self._firsts, strict=True) if first == turn]
        survey = self.survey
        records = sum(batch.record.nbytes for batch in batches if batch.record is not None)
        rows = {i for batch in batches for i, _ in batch.members}
        params = [i for i in rows if rest_of(survey.params[i]) is not None]
        spilled = [i for i in rows if survey.gradient_rests[i] is not None]
        return {
            "record_nbytes": records + sum(survey.params[i].nbytes for i in params),
            "spill_nbytes": sum(survey.numels[i] * survey.grad_dtypes[i].itemsize for i in spilled),
        }

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes all that the native call reads: hyperparameters, step counts, where the gradients are."""
        self.tier.check()
        self.begun, self._done, self._updated, self._taken = False, False, 0, 0
        in_rounds = self.tier.streams and bool(self.survey.matrices)
        ns_dtypes = [one["ns_dtype"] for one in settings] if in_rounds else []
        if self.compute.is_outdated() or not self._is_laid_out or ns_dtypes != self._ns_dtypes:
            self._ns_dtypes = ns_dtypes
            with self.compute.launching():
                self._lay_out()
        if self.survey.rests:
            rests = self.survey.gradient_rests
            for batch in self._batches:
                own = (rests[i] for i, _ in batch.members)
                batch.gradients = list({id(rest): rest for rest in own if rest is not None}.values())
        self._notes = None
        if self.moves and self.recorder is not None:
            moved = [tuple(self.on_disk(turn).values()) for turn in range(len(self._names))]
            spans = [(name, read + spilled, read) for name, (read, spilled) in zip(self._names, moved, strict=True)]
            self._notes = UpdateRecorder(self.recorder, spans)
        if self._index is not None:
            pointers = array("Q", map(operator.add, map(pointers.__getitem__, self._index), self._shifts))
        self.compute.prepare(settings, pointers)

    def take_turn(self, turn: int, scale: float) -> Any:
        """Makes one turn of an update that has been arranged and prepared; any thread may, one after the other.

        Batches of the next turns are on their way in meanwhile, those of the last ones on their way out. An error
        before the first batch is updated leaves everything as it was. Returns what `launch_turn` does.
        """
        self._take_batches(turn, scale)
        try:
            return self.compute.launch_turn(turn, scale)
        finally:
            self.begun = self.begun or self.compute.began

    def _take_batches(self, turn: int, scale: float) -> None:
        begin, end = self._taken, self._ends[turn]  # parts in lanes of their own may come out of turn
        self._scale, self._taken = scale, max(begin, end)
        if not self.moves:
            for i in range(begin, end):
                self._update(i)
            return
        if begin >= end:  # all of it stays on the device, or was in a record of an earlier turn
            return
        if self._flow is None:
            self._flow = self._flowing()
        with DeferredSignals() as signals:  # between two batches nothing is launched that nobody would wait for
            for _ in range(begin, end):
                next(self._flow)
                signals.deliver()
        if not self.tier.streams and end == len(self._batches):
            self.put_away()

    def _flowing(self, *, waits_first: bool = False) -> Generator[int, None, None]:
        count, acts = len(self._batches), (self._fetch, self._compute, self._store)
        return flowing(self._ring, count, *acts, waits_first=waits_first, behind=self.compute.behind)

    def launch(self, scale: float) -> None:
        """Launches the update of what stays on the device. The update has been prepared, and no turn taken.

        The first batch is waited for: a disk that cannot be read shows before anything has changed.
        """
        if self.compute.launches and self.moves and self._batches:
            self._flow = self._flowing(waits_first=True)
            with DeferredSignals():
                next(self._flow)
        try:
            self.compute.launch(scale)
        finally:
            self.begun = self.begun or self.compute.began

    def _update(self, i: int) -> None:
        batch, before, self.begun = self._batches[i], self.begun, True
        try:
            self.compute.run(self._scale, batch.begin, batch.end)
            self._updated = i + 1
        except BaseException as error:
            if self.compute.carried_out:  # a Ctrl-C hid that it returned
                self._updated = i + 1
            else:
                self.begun = before or self.compute.may_have_written(error)
            raise

    def _fetch(self, i: int, cell: Cell, after: Any) -> Any:
        batch = self._batches[i]
        if self._notes is not None:
            self._notes.begin("Fetch", self._firsts[i])
        for rest in (*batch.params, *batch.gradients):
            rest.fetch()
            self._fetched.append(rest)
        return self.tier.fetch(batch.record, cell, after)

    def _compute(self, i: int, cell: Cell) -> None:
        batch = self._batches[i]
        if self._notes is not None:
            self._note_ends(i)
        for rest in batch.params:
            rest.wait()
            rest.change()
        for rest in batch.gradients:
            rest.wait()
        if batch.record is not None and batch.record.unsettled:
            self.compute.settle()
        self.tier.begin(batch.record, cell, batch.members)
        self._update(i)

    def _note_ends(self, i: int) -> None:
        """Notes what has ended before a batch is updated: it was fetched, and what its cell held before was stored."""
        assert self._notes is not None
        if i + 1 == len(self._firsts) or self._firsts[i + 1] != self._firsts[i]:
            self._notes.end("Fetch", self._firsts[i])
        gone = i - len(self._ring.slots)
        if gone >= 0 and self._firsts[gone + 1] != self._firsts[gone]:
            self._notes.end("Store", self._firsts[gone])

    def _store(self, i: int, cell: Cell) -> Any:
        batch = self._batches[i]
        if self._notes is not None:
            self._notes.begin("Store", self._firsts[i])
        self.compute.leave(batch.begin)
        ticket = self.tier.store(batch.record, cell, batch.members)
        for rest in batch.params:
            self._leave(rest, awaited=True)  # by its forward
        for rest in batch.gradients:
            self._leave(rest, awaited=False)
        return ticket

    def _leave(self, rest: Rest, *, awaited: bool) -> None:
        self._fetched.remove(rest)
        rest.leave(awaited=awaited)

    def _give_back(self) -> None:
        """Lets go of what was fetched for an update that goes no further."""
        while self._fetched:
            self._fetched.pop().leave()

    def put_away(self) -> None:
        """Returns once what the turns have changed is where it rests."""
        if self._flow is not None:
            next(self._flow, None)
            self._flow = None
        self.compute.put_away()
        for turn in set(self._firsts) if self._notes is not None else ():
            self._notes.end("Store", turn)  # type: ignore[union-attr]
        self._done = True

    def break_off(self) -> None:
        """Ends an update of which no further turn will be taken."""
        flow, self._flow = self._flow, None
        if flow is not None and getgeneratorstate(flow) != GEN_RUNNING:  # as it seems to in a forked child
            flow.close()
        self._give_back()
        self.compute.break_off()

    @property
    def carried_out(self) -> bool:
        """Whether the update was made, even if an interrupt hid that it was."""
        return self.compute.launched and (self._done if self.moves else self._updated == len(self._batches))

    @property
    def torn(self) -> bool:
        """Whether an update that raised was broken off when some of the parameters had been updated."""
        return self.begun and not self.carried_out

    def stepped(self) -> None:
        """Counts an update that was made."""
        self.compute.count(self.tier)
        self.survey.cells.bump_versions()
        self.witness.stepped()

    def shown(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Returns the state to save."""
        return self.compute.shown(state, self)
