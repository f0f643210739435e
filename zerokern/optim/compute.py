"""The rows of an update in tables that kernels read, and who runs these: native calls on the host, or a device, for
which the host does not wait."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import KernelError, StateError
from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.formats import POINTERS
from zerokern.kernels.triton.backend import launching
from zerokern.kernels.triton.upload import refresh, upload
from zerokern.memory.interrupts import whole
from zerokern.optim import checks, device
from zerokern.optim.changed import Changes
from zerokern.optim.decide import Decision
from zerokern.optim.device import DeviceSteps
from zerokern.optim.matrices import parts_in_rows
from zerokern.optim.matrix_table import MatrixTable
from zerokern.optim.state import Row, StateTier, StepBook, plain
from zerokern.optim.survey import Groups, Survey, names_of, same_objects

__all__ = ["DeviceCompute", "Member", "RowTable", "TableGroup"]

_OUT = POINTERS.index("out")
Member = tuple[int, Any]
"""A row: the parameter's place in the survey, and the `RecordSpan`, `Piece` or `Matrix` that it is."""


def _master_of(row: Row) -> Tensor | None:
    """Returns what the row's published values are rounded from, if that is in memory."""
    pairs = zip(row.layout.columns, row.tensors, strict=False)
    return next((one for slot, one in pairs if slot.key == "master"), None) if row.words[_OUT] else None


@dataclass
class TableGroup:
    """Rows that share formats, hyperparameters and step count."""

    owner: int  # the param_group
    formats: dict[str, Any]
    step: int  # updates made so far, or, where the host does not know it, a label of all that have made as many
    first: bool


class RowTable:
    """The table of some rows of an update, in groups that share formats, hyperparameters and step count.

    `open_table`: makes a table of so many rows and groups, in host memory or on a device. `book`: counts the steps of
    all parameters, where the rows are all that an update has.
    """

    book: Any = None
    changes: Any = Changes()  # who reads which bits its updates change; nobody
    place = torch.device("cpu")  # where it multiplies matrices

    def __init__(self, open_table: Callable[[int, int], Any] = UpdateTable) -> None:
        self._open_table = open_table
        self.table: Any = None
        self.groups: list[TableGroup] = []
        self.by_matrix = self._tells_changes = False
        self._gradients: tuple[list[int], list[int]] | None = None

    def lay_out(
        self, survey: Survey, groups: Groups, members: Sequence[Member], rows: Sequence[Row], steps: Sequence[int]
    ) -> None:
        """Puts the rows into a new table. `steps`: those that parameters of the survey have made."""
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
        self.by_matrix = bool(survey.matrices)
        if self.by_matrix:
            parts = parts_in_rows((survey.matrices[i], place) for i, place in members)
            table: Any = MatrixTable(self._open_table, parts)
        else:
            table = self._open_table(len(rows), len(made))
        index, starts = [i for i, _ in members], [int(place.start) for _, place in members]
        table.columns["group"][:] = group_of
        table.columns["numel"][:] = array("Q", [place.numel for _, place in members])
        table.columns["key"][:] = array("Q", map(survey.numbers.__getitem__, index))
        table.columns["first"][:] = array("Q", map(operator.add, map(survey.firsts.__getitem__, index), starts))
        for name, words in zip(POINTERS, zip(*(row.words for row in rows), strict=True), strict=bool(rows)):
            table.columns[name][:] = array("Q", words)
        self._tells_changes = self.changes.wanted
        if self._tells_changes:
            rounds = [bool(row.words[_OUT]) for row in rows]
            tensors = map(survey.params.__getitem__, index)
            told = zip(tensors, starts, table.columns["numel"], rounds, map(_master_of, rows), strict=True)
            table.changed = self.changes.rows(told)
            table.columns["changed"][:] = array("Q", [bits.data_ptr() for bits in table.changed])
        shifts = [start * survey.grad_dtypes[i].itemsize for i, start in zip(index, starts, strict=True)]
        whole = index == list(range(len(survey.params))) and not any(shifts)
        self.table, self.groups, self._gradients = table, made, None if whole else (index, shifts)

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Writes what a run reads: hyperparameters, step counts, where gradients are. `pointers`: by the survey."""
        for number, group in enumerate(self.groups):
            hyper = {**settings[group.owner], "step": group.step + 1, "first_step": group.first}
            if isinstance(hyper["lr"], Tensor):
                hyper["lr"] = checks.number("lr", float(hyper["lr"]))
            self.table.set_group(number, hyper, **group.formats)
        self.point_at(pointers)

    def point_at(self, pointers: array[int]) -> None:
        """Writes where the gradients of all rows are."""
        if self._gradients is not None:
            index, shifts = self._gradients
            pointers = array("Q", map(operator.add, map(pointers.__getitem__, index), shifts))
        self.table.columns["grad"][:] = pointers

    def break_off(self) -> None:
        """Frees what an update holds that goes no further."""
        if self.by_matrix:
            self.table.break_off()

    def count(self) -> bool:
        """Counts the update that was prepared; returns whether moments have started with it."""
        started = any(group.first for group in self.groups)
        for group in self.groups:
            group.step += 1
            group.first = False
        return started

    def is_like(self, other: RowTable) -> bool:
        """Whether rows and counters of the other one are of use here."""
        return type(other) is type(self)

    def launching(self) -> AbstractContextManager[Any]:
        """The context that state and tables are made in."""
        return nullcontext()

    def check_new(self, survey: Survey, groups: Groups, tier: StateTier, new: Sequence[int]) -> None:
        """Refuses state that cannot begin now for these parameters of the survey."""

    def mark_first(self, survey: Survey, tier: StateTier, new: Sequence[int]) -> None:
        """Marks rows whose moments have not started, though their tensors are there."""

    def open_book(self, survey: Survey, tier: StateTier, last: Any) -> None:
        """Counts steps of all parameters; `last`: in this book, which fits, for nothing has changed since."""
        self.book = last or StepBook([tier.state.get(param, {}) for param in survey.all_params])

    def is_outdated(self) -> bool:
        """Whether the table must be laid out anew."""
        return self._tells_changes is not self.changes.wanted

    @property
    def run(self) -> Callable[..., None]:
        """Updates rows `begin` to `end`, with gradients times `scale`."""
        run: Callable[..., None] = self.table.run
        return run

    @property
    def carried_out(self) -> bool:
        """Whether the last call was made, even if an interrupt hid that it was."""
        return bool(self.table.carried_out)

    def may_have_written(self, error: BaseException) -> bool:
        """Whether rows may have been written by a call that raised and was not carried out.

        A native call refuses before it writes any row, and a Ctrl-C comes before it or after it. Others take several
        calls, and know how far they came.
        """
        if isinstance(self.table, UpdateTable):
            return isinstance(error, Exception) and not isinstance(error, KernelError)
        return bool(self.table.begun)

    def stepped(self, tier: StateTier, *, started: bool) -> None:
        """Counts the update that was prepared. `started`: moments of other tables have started with it."""
        if self.count() or started or tier.begins_without_rows:
            tier.started()
        self.book.advance()

    def shown(self, state: Mapping[Any, Any], tier: StateTier) -> Mapping[Any, Any]:
        """Returns the state to save."""
        return state


class DeviceCompute(RowTable):
    """Launches the table's kernels on one device.

    Only the device knows whether a step was skipped. So a moment that is to start from the gradient (SGD's) keeps that
    mark here for good, and the device takes it for started once the parameter's counter is past 0.
    """

    book: DeviceSteps

    def __init__(self, decision: Decision, last: tuple[RowTable, StateTier] | None) -> None:
        """`last`: what ran the table before this one, intact or not, and the tier of its state."""
        assert decision.device is not None
        self.place, self._decision = decision.device, decision
        self._last = last if last is not None and self.is_like(last[0]) else None
        self._kernels = device.kernels()
        super().__init__(partial(self._kernels.table, self.place))
        self._sums: _Sums | None = None
        self._in_graph = self._done = False

    def is_like(self, other: RowTable) -> bool:
        return isinstance(other, DeviceCompute) and other.place == self.place

    def launching(self) -> AbstractContextManager[Any]:
        return launching(self.place)

    def check_new(self, survey: Survey, groups: Groups, tier: StateTier, new: Sequence[int]) -> None:
        """Raises unless counters are 0 where a moment begins: they tell the device whether it has started."""
        device.refuse_capture(self.place)
        optional = tier.algorithm.optional
        for i in new:
            entry = tier.state.get(survey.params[i]) or {}
            slots = survey.layouts[i].slots
            begins = [slot.key for slot in slots if slot.key in optional and entry.get(slot.key) is None]
            if begins and entry.get("step") is not None and float(entry["step"]):
                name = names_of(groups)[survey.numbers[i]]
                raise StateError(
                    f"{name}: {begins[0]!r} would begin after {int(entry['step'])} steps, which a GPU cannot tell from "
                    f'one that has begun; set opt.state[param]["step"] to 0, or add {begins[0]!r} to it'
                )

    def mark_first(self, survey: Survey, tier: StateTier, new: Sequence[int]) -> None:
        for i in new:
            row = tier.rows[id(survey.params[i])]
            before = self._row_before(row.param)
            if before is not None and before.first and row.layout is before.layout:
                pairs = zip(row.layout.columns, row.tensors, before.tensors, strict=True)
                row.first |= all(now is then for slot, now, then in pairs if slot.key in tier.algorithm.optional)

    def _row_before(self, param: Any) -> Any:
        row = None if self._last is None else self._last[1].rows.get(id(param))
        return row if row is not None and row.param is param else None

    def open_book(self, survey: Survey, tier: StateTier, last: DeviceSteps | None) -> None:
        """Keeps the book of the last binding if it has the same parameters: captured graphs count in it."""
        if last is not None:
            self.book = last
            return
        device.refuse_capture(self.place)
        everyone, book = survey.all_params, None if self._last is None else self._last[0].book
        entries = [tier.state.get(param, {}) for param in everyone]
        if book is not None and not book.watch.in_place():
            book = None
        if book is None or not same_objects(book.params, everyone):
            book = DeviceSteps(self.place, everyone, book)
        book.adopt(entries)
        for number, (param, entry) in enumerate(zip(everyone, entries, strict=True)):
            row = tier.rows.get(id(param))
            if row is not None and row.first and "step" not in entry:
                before = self._row_before(param)
                if before is None or not before.first:
                    book.restart(number)
        self.book = book

    def lay_out(
        self, survey: Survey, groups: Groups, members: Sequence[Member], rows: Sequence[Row], steps: Sequence[int]
    ) -> None:
        self._last = None  # nothing asks for the rows before any more
        self._survey, self._rows = survey, rows
        super().lay_out(survey, groups, members, rows, steps)
        witnesses: dict[int, int] = {}
        for group, (i, _) in zip(self.table.columns["group"], members, strict=True):
            witnesses.setdefault(group, survey.numbers[i])
        self._witnesses = [witnesses[group] for group in range(len(self.groups))]

    def is_outdated(self) -> bool:
        """Whether another table is needed: each capture has its own, because a replay fills it again."""
        capturing = device.capturing(self.place)
        if not capturing and not self._in_graph:
            return super().is_outdated()
        self._in_graph, self._sums = capturing, None
        return True

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        for number, group in enumerate(self.groups):
            hyper = {**settings[group.owner], "first_step": group.first}
            if isinstance(lr := hyper["lr"], Tensor):  # of the host's the value is sent, in the order
                hyper["lr"] = (
                    float(lr)
                    if lr.is_cpu and self.place.type != "cpu"
                    else lr.detach().to(self.place, non_blocking=True)
                )
            self.table.set_group(number, hyper, **group.formats)
        self.point_at(pointers)
        self._pointers = pointers

    @property
    def run(self) -> Callable[..., None]:
        return self._launch

    def _launch(self, scale: float, begin: int = 0, end: int | None = None) -> None:
        """Launches the update of all rows."""
        self._done, self.table.begun = False, False
        with launching(self.place), whole("the step"):
            control = self._control()
            launch = self.table.launch if self.by_matrix else self.table.run
            launch(scale, control)
            self._done = True

    def _control(self) -> Any:
        decision, book = self._decision, self.book
        if decision.max_norm is not None and self._sums is None:
            self._sums = _Sums(self._survey, self.place, self._kernels.sums)
        control = self._kernels.control(
            steps=book.steps,
            increments=book.increments,
            witnesses=self._witnesses,
            outcome=decision.outcome,
            max_norm=decision.max_norm,
            sums=None if decision.max_norm is None or self._sums is None else self._sums.run(self._pointers, decision),
            grad_scale=decision.grad_scale,
            found_inf=decision.found_inf,
        )
        if self._in_graph:
            decision.graphs.append((self._rows, self.table, self._sums, control))
        return control

    @property
    def carried_out(self) -> bool:
        return self._done

    def may_have_written(self, error: BaseException) -> bool:
        """Whether launches were broken off: the host does not know what those before the refused one have changed."""
        return self.table.begun and not self._done

    def stepped(self, tier: StateTier, *, started: bool) -> None:
        self._decision.launched()
        self.book.advance()

    def shown(self, state: Mapping[Any, Any], tier: StateTier) -> dict[Any, Any]:
        """Returns counters with memory of their own, and no moment that nothing has started. Waits for the device."""
        made = plain(state)
        entries = [entry for entry in made.values() if isinstance(entry, dict)]
        counted = [entry for entry in entries if isinstance(entry.get("step"), Tensor)]
        if counted:
            steps = torch._foreach_mul([entry["step"] for entry in counted], 1.0)
            for entry, step in zip(counted, steps, strict=True):
                entry["step"] = step
        marked = [row for row in tier.rows.values() if row.first]
        counts = dict(zip(map(id, tier.survey.all_params), self.book.steps.tolist(), strict=True)) if marked else {}
        for row in marked:
            entry = made.get(row.param, {})
            for key in tier.algorithm.optional if counts[id(row.param)] == 0 else ():
                if any(entry.get(key) is tensor for tensor in row.tensors):
                    del entry[key]
        return {key: entry for key, entry in made.items() if entry or not state[key]}


class _Sums:
    """Computes sums of squares of gradients on the device: for each dtype, or for each share over all ranks."""

    def __init__(self, survey: Survey, place: torch.device, make: Any) -> None:
        self._place = place
        self._shares = [share for share, _ in survey.terms]
        self._chosen = [survey.chosen(*term) for term in survey.terms]
        self._tables = [
            make(place, list(compress(survey.numels, chosen)), dtype)
            for (_, dtype), chosen in zip(survey.terms, self._chosen, strict=True)
        ]
        self._out = torch.zeros(len(self._tables), dtype=torch.float64, device=place)
        self._totals = torch.zeros(survey.nshares, dtype=torch.float64, device=place)
        self._known: array[int] | None = None
        self._words: list[Tensor] = []

    def run(self, pointers: array[int], decision: Decision) -> Tensor:
        if pointers != self._known:
            mine = [array("Q", compress(pointers, chosen)) for chosen in self._chosen]
            if self._words:
                for words, fresh in zip(self._words, mine, strict=True):
                    refresh(words, fresh)
            else:
                self._words = [upload(fresh, self._place) for fresh in mine]
            self._known = pointers
        for index, (table, words) in enumerate(zip(self._tables, self._words, strict=True)):
            table.run(words, self._out, index)
        if decision.add_up is None:
            return self._out
        sums = [torch.zeros((), dtype=torch.float64, device=self._place) for _ in self._totals]
        for share, one in zip(self._shares, self._out.unbind(), strict=True):
            sums[share] = sums[share] + one
        decision.add_up(sums, self._totals, decision.found_inf)
        return self._totals
