"""A survey joined to state on a device: an update that the host launches and does not wait for."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.kernels.triton.backend import launching
from zerokern.kernels.triton.upload import refresh, upload
from zerokern.optim import device
from zerokern.optim.binding import Binding, table_of
from zerokern.optim.decide import Decision
from zerokern.optim.device_steps import DeviceSteps
from zerokern.optim.formats import Algorithm
from zerokern.optim.interrupts import whole
from zerokern.optim.outside import WatchedState, Witness, plain
from zerokern.optim.state import Entry, Exact
from zerokern.optim.survey import Groups, Survey, names_of, same_objects


class DeviceBinding(Binding):
    """What `Binding` is to state in host memory.

    Only the device knows whether a step was skipped. So a moment that is to start from the gradient (SGD's) keeps that
    mark here for good, and the device takes it for started once the parameter's counter is past 0.
    """

    book: DeviceSteps

    def __init__(
        self,
        algorithm: Algorithm,
        survey: Survey,
        groups: Groups,
        state: WatchedState,
        decision: Decision,
        *,
        initial: Sequence[float],
        previous: DeviceBinding | None,
        last: DeviceBinding | None,
        witness: Witness | None,
        exact: Exact | None = None,
    ) -> None:
        """`last` is the binding before this one, intact or not; `previous` is the same if it is."""
        assert decision.device is not None
        self.place = decision.device
        if previous is None:
            device.refuse_capture(self.place)
        self._decision, self._last = decision, last
        self._kernels = device.kernels()
        self._sums: _Sums | None = None
        self._in_graph = self._done = False
        with launching(self.place):
            super().__init__(
                algorithm, survey, groups, state, initial=initial, previous=previous, witness=witness, exact=exact
            )
        self._last = None

    def _add(self, groups: Groups, initial: Sequence[float], new: Sequence[int]) -> None:
        device.refuse_capture(self.place)
        self._refuse_late_moments(groups, new)
        super()._add(groups, initial, new)
        for i in new:
            row = self.rows[id(self.survey.params[i])]
            before = self._row_before(row.param)
            if before is not None and before.first and row.layout is before.layout:
                pairs = zip(row.layout.columns, row.tensors, before.tensors, strict=True)
                row.first |= all(now is then for slot, now, then in pairs if slot.key in self._algorithm.optional)

    def _refuse_late_moments(self, groups: Groups, new: Sequence[int]) -> None:
        """The counter tells the device whether a moment has started: it must be at 0 when one begins."""
        for i in new:
            param, layout = self.survey.params[i], self.survey.layouts[i]
            entry = self._state.get(param) or {}
            begins = [s.key for s in layout.slots if s.key in self._algorithm.optional and entry.get(s.key) is None]
            if begins and entry.get("step") is not None and float(entry["step"]):
                name = names_of(groups)[self.survey.numbers[i]]
                raise StateError(
                    f"{name}: {begins[0]!r} would begin after {int(entry['step'])} steps, which a GPU cannot tell from "
                    f'one that has begun; set opt.state[param]["step"] to 0, or add {begins[0]!r} to it'
                )

    def _row_before(self, param: Tensor) -> Any:
        row = None if self._last is None else self._last.rows.get(id(param))
        return row if row is not None and row.param is param else None

    def _open_book(self, entries: Sequence[Entry]) -> DeviceSteps:
        """The book there is, as long as it is about the same parameters: graphs count in it."""
        device.refuse_capture(self.place)
        everyone, book = self.survey.everyone, None if self._last is None else self._last.book
        if book is not None and not book.in_place():
            book = None
        if book is None or not same_objects(book.params, everyone):
            book = DeviceSteps(self.place, everyone, book)
        book.adopt(entries)
        for number, (param, entry) in enumerate(zip(everyone, entries, strict=True)):
            row = self.rows.get(id(param))
            if row is not None and row.first and "step" not in entry:
                before = self._row_before(param)
                if before is None or not before.first:
                    book.restart(number)
        return book

    def _plan(self, groups: Groups) -> None:
        survey, self._param_groups = self.survey, groups
        labels = self.book.choose(survey.numbers)
        self.table, self.groups = table_of(survey, groups, self._rows, labels, self._open_table)
        witnesses: dict[int, int] = {}
        for group, number in zip(self.table.columns["group"], survey.numbers, strict=True):
            witnesses.setdefault(group, number)
        self._witnesses = [witnesses[group] for group in range(len(self.groups))]

    def _open_table(self, nrows: int, ngroups: int) -> Any:
        return self._kernels.table(self.place, nrows, ngroups)

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        """Everything that the launches read: hyperparameters and where the gradients are."""
        capturing = device.capturing(self.place)
        if capturing or self._in_graph:
            self._part_from_graphs(capturing)
        for number, group in enumerate(self.groups):
            values = {**group.formats, **settings[group.owner], "first_step": group.first}
            if isinstance(values["lr"], Tensor):
                values["lr"] = values["lr"].detach().to(self.place, non_blocking=True)
            self.table.set_group(number, **values)
        self.table.columns["grad"][:] = pointers
        self._pointers = pointers

    def _part_from_graphs(self, capturing: bool) -> None:
        """Tables that no other capture has, and no step outside: a graph fills its own whenever it is replayed."""
        self._in_graph, self._sums = capturing, None
        with launching(self.place):
            self._plan(self._param_groups)

    def run(self, scale: float) -> None:
        """The update. When this returns it has been launched."""
        self._done, self.table.begun = False, False
        with launching(self.place), whole("the step"):
            control = self._control()
            self.table.run(scale, control)
            self._done = True

    def _control(self) -> Any:
        decision, book = self._decision, self.book
        if decision.max_norm is not None and self._sums is None:
            self._sums = _Sums(self.survey, self.place, self._kernels.sums)
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

    @property
    def torn(self) -> bool:
        """Whether launches were broken off: it is not known here what those before the refused one have changed."""
        return self.table.begun and not self._done

    def stepped(self) -> None:
        """Account for an update that was launched."""
        self.book.advance(certain=self._decision.launched())
        self.survey.cells.bump_versions()
        self.witness.stepped()

    def shown(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state to save: counters with memory of their own, and no moment that nothing has started. Waits."""
        made = plain(state)
        entries = [entry for entry in made.values() if isinstance(entry, dict)]
        counted = [entry for entry in entries if isinstance(entry.get("step"), Tensor)]
        if counted:
            steps = torch._foreach_mul([entry["step"] for entry in counted], 1.0)
            for entry, step in zip(counted, steps, strict=True):
                entry["step"] = step
        marked = [row for row in self.rows.values() if row.first]
        counts = dict(zip(map(id, self.survey.everyone), self.book.steps.tolist(), strict=True)) if marked else {}
        for row in marked:
            entry = made.get(row.param, {})
            for key in self._algorithm.optional if counts[id(row.param)] == 0 else ():
                if any(entry.get(key) is tensor for tensor in row.tensors):
                    del entry[key]
        return {key: entry for key, entry in made.items() if entry or not state[key]}


class _Sums:
    """The sums of squares of the gradients on the device: one for each dtype, or for each share over all ranks."""

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
