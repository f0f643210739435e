"""Launches an update on the device that parameters lie on; the host does not wait for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels.triton.backend import launching
from zerokern.kernels.triton.upload import refresh, upload
from zerokern.memory.interrupts import whole
from zerokern.optim import device
from zerokern.optim.decide import Decision
from zerokern.optim.device import DeviceSteps
from zerokern.optim.outside import plain
from zerokern.optim.row_table import Member, RowTable
from zerokern.optim.state import Row, StateTier
from zerokern.optim.survey import Groups, Survey, names_of, same_objects

if TYPE_CHECKING:
    from zerokern.optim.binding import Binding

__all__ = ["DeviceCompute"]


class DeviceCompute(RowTable):
    """Launches the table's kernels on one device.

    Only the device knows whether a step was skipped. So a moment that is to start from the gradient (SGD's) keeps that
    mark here for good, and the device takes it for started once the parameter's counter is past 0.
    """

    book: DeviceSteps

    def __init__(self, decision: Decision, last: Binding | None) -> None:
        """`last`: the binding before this one, intact or not."""
        assert decision.device is not None
        self.place, self._decision = decision.device, decision
        self._last = last if last is not None and self.is_like(last.compute) else None
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
        row = None if self._last is None else self._last.tier.rows.get(id(param))
        return row if row is not None and row.param is param else None

    def open_book(self, survey: Survey, tier: StateTier, last: DeviceSteps | None) -> None:
        """Keeps the book of the last binding if it has the same parameters: captured graphs count in it."""
        if last is not None:
            self.book = last
            return
        device.refuse_capture(self.place)
        everyone, book = survey.all_params, None if self._last is None else self._last.compute.book
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
            return False
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
