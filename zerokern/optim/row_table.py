"""Rows of an update: which elements of a parameter each of them is, and the table that kernels read them from."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import KernelError
from zerokern.kernels.cpu import UpdateTable
from zerokern.kernels.formats import POINTERS
from zerokern.optim import checks
from zerokern.optim.matrices import parts_in_rows
from zerokern.optim.matrix_table import MatrixTable
from zerokern.optim.state import Row, StateTier, StepBook
from zerokern.optim.survey import Groups, Survey

__all__ = ["Member", "RowTable", "TableGroup"]

Member = tuple[int, Any]
"""A row: the parameter's place in the survey, and the `RecordSpan`, `Segment` or `Matrix` that it is; None: all of a
parameter in memory."""


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
    place = torch.device("cpu")  # where it multiplies matrices

    def __init__(self, open_table: Callable[[int, int], Any] = UpdateTable) -> None:
        self._open_table = open_table
        self.table: Any = None
        self.groups: list[TableGroup] = []
        self.by_matrix = False
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
        index, starts = [i for i, _ in members], [0 if place is None else int(place.start) for _, place in members]
        table.columns["group"][:] = group_of
        numels = (survey.numels[i] if place is None else place.numel for i, place in members)
        table.columns["numel"][:] = array("Q", numels)
        table.columns["key"][:] = array("Q", map(survey.numbers.__getitem__, index))
        table.columns["first"][:] = array("Q", map(operator.add, map(survey.firsts.__getitem__, index), starts))
        for name, words in zip(POINTERS, zip(*(row.words for row in rows), strict=True), strict=bool(rows)):
            table.columns[name][:] = array("Q", words)
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
        return False

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
