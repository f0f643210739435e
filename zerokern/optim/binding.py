"""A survey joined to optimizer state and to the native table of pointers, one row for each parameter: what one call
updates."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.core.errors import KernelError
from zerokern.kernels.cpu import StepTable, UpdateTable
from zerokern.memory import HostTier
from zerokern.memory.addresses import AddressRecord
from zerokern.optim import checks
from zerokern.optim.formats import Algorithm, Layout, Slot
from zerokern.optim.outside import WatchedState, Witness
from zerokern.optim.state import Entry, Exact, StepBook, begin, check_entries, make, pull, untangled
from zerokern.optim.survey import Groups, Survey, same_objects
from zerokern.zero.kinds import present, rest_of

Turns = Sequence[Sequence[int]]
"""Places among an optimizer's parameters that are updated one after the other."""
_POINTERS = ("param", "remainder", "master", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "out")


class Row:
    """Where a parameter and its state lie. `first`: its moment is yet to start from the gradient.

    Storages are held, so that memory that somebody takes from a state tensor (`.data`) is not freed under a call.
    """

    __slots__ = ("first", "layout", "param", "param_pointer", "storages", "tensors", "words")

    def __init__(self, param: Tensor, param_pointer: int, layout: Layout, entry: Entry, first: bool) -> None:
        self.param, self.param_pointer, self.layout, self.first = param, param_pointer, layout, first
        slots = [slot for slot in layout.slots if slot.column]
        self.tensors = [entry[slot.key] for slot in slots]
        held = self.tensors if rest_of(param) is not None else (param, *self.tensors)  # else it would count as in use
        self.storages = [tensor.untyped_storage() for tensor in held]
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        words = dict(zip((slot.column for slot in slots), addresses, strict=True))
        words[layout.param_column] = param_pointer
        self.words = pointer_words(words)

    def fits(self, param: Tensor, param_pointer: int, layout: Layout) -> bool:
        return self.param is param and self.param_pointer == param_pointer and self.layout is layout


class Pointed(Protocol):
    """What the table reads of a row. `words`: addresses in the order of `pointer_words`."""

    layout: Layout
    first: bool
    words: tuple[int, ...]


class Columns(Protocol):
    """Rows as columns. A `Survey` is one, whose rows are whole parameters."""

    owners: list[int]
    numbers: list[int]
    numels: list[int]
    grad_dtypes: list[torch.dtype]
    firsts: list[int]  # the element of a whole parameter that the row begins with


def pointer_words(pointers: dict[str, int]) -> tuple[int, ...]:
    """Addresses by column as the table orders them, 0 where a format needs none."""
    return tuple(pointers.get(name, 0) for name in _POINTERS)


@dataclass
class TableGroup:
    """Rows that share formats, hyperparameters and step count."""

    owner: int  # the param_group
    formats: dict[str, Any]
    step: int  # updates made so far, or, where the host does not know it, a label of all that have made as many
    first: bool


def table_of(
    columns: Columns,
    groups: Groups,
    rows: Sequence[Pointed],
    steps: Sequence[int],
    open_table: Callable[[int, int], Any] = StepTable,
) -> tuple[Any, list[TableGroup]]:
    """The table of all rows; those that differ in format, owner or step count are in different groups of it."""
    made: list[TableGroup] = []
    numbers: dict[tuple[Any, ...], int] = {}
    members = array("Q")
    for row, owner, grad_dtype, step in zip(rows, columns.owners, columns.grad_dtypes, steps, strict=True):
        key = (owner, id(row.layout), grad_dtype, step, row.first)
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(made)
            formats = row.layout.table_formats(groups[owner]["stochastic_seed"])
            made.append(TableGroup(owner, {**formats, "grad_dtype": grad_dtype}, step, row.first))
        members.append(number)
    table = open_table(len(rows), len(made))
    table.columns["group"][:] = members
    table.columns["numel"][:] = array("Q", columns.numels)
    table.columns["key"][:] = array("Q", columns.numbers)
    table.columns["first"][:] = array("Q", columns.firsts)
    for name, words in zip(_POINTERS, zip(*(row.words for row in rows), strict=True), strict=bool(rows)):
        table.columns[name][:] = array("Q", words)
    return table, made


def set_groups(table: UpdateTable, groups: Sequence[TableGroup], settings: Sequence[dict[str, Any]]) -> None:
    """Give the table's groups the hyperparameters and step counts of the update to come."""
    for number, group in enumerate(groups):
        values = {**group.formats, **settings[group.owner], "step": group.step + 1, "first_step": group.first}
        if isinstance(values["lr"], Tensor):
            values["lr"] = checks.number("lr", float(values["lr"]))
        table.set_group(number, **values)


def count_step(groups: Sequence[TableGroup]) -> None:
    """The update that `set_groups` prepared was made."""
    for group in groups:
        group.step += 1
        group.first = False


def row_ranges(members: Sequence[int], rows: dict[int, int]) -> list[tuple[int, int]]:
    """The rows of these members in a table, as few [begin, end) as possible. `rows`: a member's row.

    >>> row_ranges((4, 5, 6, 9), {4: 0, 5: 1, 9: 2, 7: 3})
    [(0, 3)]
    """
    found = sorted(rows[member] for member in members if member in rows)
    ranges: list[tuple[int, int]] = []
    for row in found:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


class Binding:
    """Made from a survey; valid as long as the survey is and `intact` says so."""

    rests_on_disk = False

    def __init__(
        self,
        algorithm: Algorithm,
        survey: Survey,
        groups: Groups,
        state: WatchedState,
        *,
        initial: Sequence[float],
        previous: Binding | None,
        witness: Witness | None,
        exact: Exact | None = None,
        room: HostTier | None = None,
    ) -> None:
        """Check all state, then make what is missing (moments start at `initial[owner]`, or zero) and point at it.

        `previous` is an intact binding of the same state, whose rows need no second look. `exact` knows of values that
        parameters began with and that were rounded away. `room`: where state is to lie, if not in memory of its own.
        """
        self._algorithm, self.survey, self._state = algorithm, survey, state
        self._exact, self._room = exact, room
        self.begun = False  # whether anything of the last update that was prepared may have been made
        self.turns: Turns = ()
        present = set(map(id, survey.everyone))
        last = {} if previous is None else previous.rows
        self.rows: dict[int, Row] = {key: row for key, row in last.items() if key in present}
        new = [i for i in range(len(survey.params)) if not self._knows(i)]
        if new:
            self._add(groups, initial, new)
        if new or previous is None or not same_objects(survey.everyone, previous.survey.everyone):
            self.book = self._open_book([state.get(param, {}) for param in survey.everyone])
        else:
            self.book = previous.book
        self.witness = Witness.renewed(witness, state)
        self._find()
        if state.mark.changed:
            state.watch_all()
        self._plan(groups)

    def _find(self) -> None:
        """Where the state is that the update is about."""
        self._rows: Sequence[Any] = [self.rows[id(param)] for param in self.survey.params]
        self._whereabouts = AddressRecord([tensor for row in self._rows for tensor in row.tensors])

    def _open_book(self, entries: Sequence[Entry]) -> Any:
        return StepBook(entries)

    def _plan(self, groups: Groups) -> None:
        """Put the rows into a table."""
        self.table, self.groups = table_of(self.survey, groups, self._rows, self.book.choose(self.survey.numbers))

    def _knows(self, i: int) -> bool:
        param, survey = self.survey.params[i], self.survey
        row = self.rows.get(id(param))
        return row is not None and row.fits(param, survey.param_pointers[i], survey.layouts[i])

    def _add(self, groups: Groups, initial: Sequence[float], new: Sequence[int]) -> None:
        """Check all state of these parameters, then make what is missing."""
        survey, state, optional = self.survey, self._state, self._algorithm.optional
        check_entries(survey, groups, state, new, [state.get(survey.params[i]) for i in new], optional)
        made: list[tuple[int, Tensor, Entry, Slot]] = []
        entries: list[Entry] = []
        for i in new:
            param, layout = survey.params[i], survey.layouts[i]
            entries.append(state.get(param) or {})
            made += [(i, param, entries[-1], slot) for slot in layout.slots if entries[-1].get(slot.key) is None]
        with torch.no_grad():
            if self._room is not None:
                self._untangle(entries, new)
            make([(param, entry, slot) for _, param, entry, slot in made], self._room)
            self._start(initial, made)
            for i, entry in zip(new, entries, strict=True):
                pull(entry, survey.layouts[i], survey.params[i], self._room)
        firsts = {i for i, _, _, slot in made if slot.key in optional}
        for i, entry in zip(new, entries, strict=True):
            param = survey.params[i]
            self.rows[id(param)] = Row(param, survey.param_pointers[i], survey.layouts[i], entry, i in firsts)

    def _untangle(self, entries: Sequence[Entry], new: Sequence[int]) -> None:
        """State that was exchanged between parameters is brought back from copies, not from what is being written."""
        assert self._room is not None
        places = self._room.addresses()
        for i, entry in zip(new, entries, strict=True):
            entry.update(untangled(entry, self.survey.params[i], places))

    def _start(self, initial: Sequence[float], made: Sequence[tuple[int, Tensor, Entry, Slot]]) -> None:
        moments = {key for key, _ in self._algorithm.moments}
        for i, param, entry, slot in made:
            self._state[param] = entry
            if slot.key in ("master", "remainder"):
                with present(param, written=True):
                    begin(param, slot, entry[slot.key], None if self._exact is None else self._exact(param))
            elif slot.key in moments and initial[self.survey.owners[i]]:
                entry[slot.key].fill_(initial[self.survey.owners[i]])

    def intact(self, state: WatchedState) -> bool:
        """Whether every state tensor is the one, and lies where, the table points at.

        What was assigned to the state shows by its mark, a tensor whose memory was exchanged (`.data`) by its address.
        """
        known = state is self._state and not state.mark.changed
        return known and self._whereabouts.unchanged() and self.book.untouched()

    def arrange(self, turns: Turns) -> None:
        """An update is to be made turn by turn: each has the parameters in these places of the optimizer's."""
        if turns != self.turns:
            self.turns = turns
            self._arrange()

    def _arrange(self) -> None:
        rows = {number: row for row, number in enumerate(self.survey.numbers)}
        self._ranges = [row_ranges(members, rows) for members in self.turns]

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Everything that the native call reads: hyperparameters, step counts, where the gradients are."""
        self.begun = False
        set_groups(self.table, self.groups, settings)
        self.table.columns["grad"][:] = pointers

    def nbytes_of(self, param: Tensor) -> int:
        """The state that an update of this parameter reads and writes."""
        row = self.rows.get(id(param))
        return 0 if row is None else sum(one.nbytes for one in row.tensors)

    def run(self, scale: float) -> None:
        """The update: one native call."""
        self.table.run(scale)

    def take_turn(self, turn: int, scale: float) -> None:
        """Its share of an update that has been arranged and prepared; any thread may, one after the other."""
        for first, end in self._ranges[turn]:
            self.run_rows(scale, first, end)

    def run_rows(self, scale: float, begin: int = 0, end: int | None = None) -> None:
        """An update of these rows of the table."""
        before, self.begun = self.begun, True
        try:
            self.table.run(scale, begin, end)
        except KernelError:  # refused before it wrote anything
            self.begun = before
            raise

    def put_away(self) -> None:
        """Returns once what the turns have changed is where it rests."""

    def break_off(self) -> None:
        """No further turn will be taken."""

    @property
    def carried_out(self) -> bool:
        """Whether the update was made, even if an interrupt hid that it was."""
        return self.table.carried_out

    @property
    def torn(self) -> bool:
        """Whether an update that raised may have been made in part: never, for it is one call."""
        return False

    def stepped(self) -> None:
        """Account for an update that was made."""
        if any(group.first for group in self.groups):
            for row in self._rows:
                row.first = False
        count_step(self.groups)
        self.book.advance()
        self.survey.cells.bump_versions()
        self.witness.stepped()
