"""Rows of the native table: one parameter joined to its checked state, and the groups that rows belong to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokern.kernels.cpu import StepTable, UpdateTable
from zerokern.optim import checks
from zerokern.optim.formats import Layout
from zerokern.optim.state import Entry
from zerokern.optim.survey import Groups
from zerokern.zero.kinds import rest_of

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
