"""A survey joined to state on disk: an update that reads records, updates them and writes them back, all at once."""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.memory import Rest, Slot, flow, flowing
from zerokern.memory.addresses import AddressRecord
from zerokern.memory.stream import Record
from zerokern.optim.binding import Binding, pointer_words, table_of
from zerokern.optim.disk import Disk, Stretch, begin_with, described, moved_in, on_disk_of, settle, stand_ins
from zerokern.optim.formats import ON_DISK, Algorithm, Layout
from zerokern.optim.interrupts import whole
from zerokern.optim.outside import WatchedState, Witness
from zerokern.optim.state import Entry, Exact, check_entries, make
from zerokern.optim.survey import Groups, Survey, names_of
from zerokern.optim.visits import Visits
from zerokern.zero.kinds import rest_of


@dataclass
class SpanRow:
    """A row of the update table: a span of a parameter, and where its state lies in a slot."""

    layout: Layout
    first: bool
    words: tuple[int, ...]


class Item(NamedTuple):
    """A record on its way through the ring, and the rows of the table that it has; it always has the same slot.

    `rests`: where the parameters are while nobody uses them. They come with the record, and leave with it.
    """

    record: Record
    begin: int
    end: int
    visits: list[tuple[int, Stretch]]  # (number in the survey, place)
    rests: list[Rest]


class DiskBinding(Binding):
    """What `Binding` is to state in memory: the rows of its table are spans, whose state is in the ring in its turn."""

    rests_on_disk = True

    def __init__(
        self,
        algorithm: Algorithm,
        survey: Survey,
        groups: Groups,
        state: WatchedState,
        disk: Disk,
        *,
        initial: Sequence[float],
        witness: Witness | None,
        exact: Exact | None = None,
    ) -> None:
        """As `Binding`. Nothing is written to the state before there is room on disk for all of it."""
        self._disk, self._param_groups, self._done = disk, groups, False
        self._flow: Generator[int, None, None] | None = None
        super().__init__(algorithm, survey, groups, state, initial=initial, previous=None, witness=witness, exact=exact)

    def _find(self) -> None:
        self._owners = [on_disk_of(self._state.get(param)) for param in self.survey.params]
        self._rows = [owner for owner in self._owners if owner is not None]
        self._whereabouts = AddressRecord([])
        if self._state.mark.changed:
            self._disk.sweep(stand_ins(self._state))

    def _knows(self, i: int) -> bool:
        param, layout = self.survey.params[i], self.survey.layouts[i]
        entry = self._state.get(param)
        owner = on_disk_of(entry)
        if self._state.mark.changed:
            return False
        if owner is None:
            return not layout.columns and (not layout.counter or (entry is not None and "step" in entry))
        return owner.fits(self._disk, param, layout)

    def _add(self, groups: Groups, initial: Sequence[float], unknown: Sequence[int]) -> None:
        survey, disk, state, algorithm = self.survey, self._disk, self._state, self._algorithm
        entries = [state.get(survey.params[i]) or {} for i in unknown]
        seen = []
        for i, entry in zip(unknown, entries, strict=True):
            seen.append(described(disk, lambda i=i: names_of(groups)[survey.numbers[i]], entry))  # type: ignore[misc]
        check_entries(survey, groups, state, unknown, seen, algorithm.optional)
        fresh: list[int] = []
        moving: list[tuple[int, Entry]] = []
        for i, entry in zip(unknown, entries, strict=True):
            layout, owner = survey.layouts[i], on_disk_of(entry)
            if owner is not None and {*layout.columns} <= {*owner.slots}:
                owner.param, owner.layout = survey.params[i], layout
            elif owner is not None or any(entry.get(slot.key) is not None for slot in layout.columns):
                moving.append((i, entry))
            elif not entry.keys() >= {slot.key for slot in layout.slots}:
                fresh.append(i)
        if moving:
            wanted = [(survey.params[i], entry, survey.layouts[i]) for i, entry in moving]
            self._put(moving, moved_in(disk, wanted, algorithm))
        if fresh:
            self._put([(i, state.get(survey.params[i]) or {}) for i in fresh], self._begun(initial, fresh))

    def _begun(self, initial: Sequence[float], fresh: Sequence[int]) -> list[Entry]:
        """Entries for parameters without state, with room on disk for all of it."""
        survey = self.survey
        stored = [i for i in fresh if survey.layouts[i].columns]
        wanted = [
            (
                survey.params[i],
                layout,
                initial[survey.owners[i]],
                any(s.key in self._algorithm.optional for s in layout.columns),
            )
            for i in stored
            for layout in (survey.layouts[i],)
        ]
        owners = dict(zip(stored, self._disk.make(wanted) if wanted else (), strict=True))
        for i, owner in owners.items():
            if self._exact is not None and owner.has_master:
                begin_with(owner, self._exact(survey.params[i]))
        entries: list[Entry] = [{ON_DISK: owners[i]} if i in owners else {} for i in fresh]
        pairs = zip(fresh, entries, strict=True)
        make([(survey.params[i], entry, slot) for i, entry in pairs for slot in survey.layouts[i].counter])
        return entries

    def _put(self, old: Sequence[tuple[int, Entry]], new: Sequence[Entry]) -> None:
        """Entries take the place of others; what an entry holds beside our own keys stays in it."""
        for (i, was), entry in zip(old, new, strict=True):
            ours = {ON_DISK, *(slot.key for slot in self.survey.layouts[i].slots)}
            others = {key: value for key, value in was.items() if key not in ours}
            self._state[self.survey.params[i]] = {**entry, **others}

    def _plan(self, groups: Groups) -> None:
        self._planned = False  # `prepare` does: by then it is known whether there are turns

    def _arrange(self) -> None:
        self._planned = False

    def _lay_out(self, groups: Groups) -> None:
        """The rows of the table, record by record, with their state at the addresses that it will have in the ring.

        Where an update is made turn by turn, a record with spans of several comes in the first of these: from there on
        all gradients may be read, and what is updated early is not seen early.
        """
        survey, slots = self.survey, self._disk.ring.slots if self._disk.is_open else []
        visits: dict[Record, list[tuple[int, Stretch]]] = {}
        loose: list[int] = []
        for i, owner in enumerate(self._owners):
            if owner is None:
                loose.append(i)
                continue
            for place in owner.places:
                visits.setdefault(place.record, []).append((i, place))
        turn_of = {number: turn for turn, members in enumerate(self.turns) for number in members}
        turns = [turn_of.get(number, 0) for number in survey.numbers]
        first = {record: min(turns[i] for i, _ in some) for record, some in visits.items()}
        last = {record: max(turns[i] for i, _ in some) for record, some in visits.items()}
        loose.sort(key=turns.__getitem__)
        self._items: list[Item] = []
        rows: list[SpanRow] = []
        self._index: list[int] = []
        starts: list[int] = []
        self.numels: list[int] = []
        # what several turns share is followed by the next one's own: parameters that rest come once for all of theirs
        for number, record in enumerate(sorted(visits, key=lambda record: (first[record], last[record]))):
            some = visits[record]
            slot = slots[number % len(slots)]
            begin = len(rows)
            for i, place in some:
                rows.append(self._row(i, place, slot))
                self._index.append(i)
                starts.append(place.start)
                self.numels.append(place.numel)
            rests = {id(rest): rest for i, _ in some if (rest := rest_of(survey.params[i])) is not None}
            self._items.append(Item(record, begin, len(rows), some, list(rests.values())))
        self._ends = list(accumulate(Counter(first.values())[turn] for turn in range(len(self.turns))))
        loose_ends = list(accumulate(Counter(turns[i] for i in loose)[turn] for turn in range(len(self.turns))))
        self._loose = len(rows)
        self._loose_ends = [self._loose + end for end in (0, *loose_ends)]
        for i in loose:
            rows.append(self._row(i, None, None))
            self._index.append(i)
            starts.append(0)
            self.numels.append(survey.numels[i])
        self._borrowed: list[Rest] = []
        chosen = self._index
        self.owners = [survey.owners[i] for i in chosen]
        self.numbers = [survey.numbers[i] for i in chosen]
        self.grad_dtypes = [survey.grad_dtypes[i] for i in chosen]
        self.firsts = [survey.firsts[i] + start for i, start in zip(chosen, starts, strict=True)]
        self._shifts = [start * dtype.itemsize for start, dtype in zip(starts, self.grad_dtypes, strict=True)]
        steps = self.book.choose(survey.numbers)
        self.table, self.groups = table_of(self, groups, rows, [steps[i] for i in chosen])

    def _row(self, i: int, place: Stretch | None, slot: Slot | None) -> SpanRow:
        survey, owner = self.survey, self._owners[i]
        layout = survey.layouts[i]
        start = 0 if place is None else place.start
        pointers = {layout.param_column: survey.param_pointers[i] + start * survey.param_dtypes[i].itemsize}
        if owner is not None and place is not None and slot is not None:
            for column, inside, _, _ in owner.spans(place):
                pointers.setdefault(column.column, slot.lease.ptr + inside)
        return SpanRow(layout, owner is not None and owner.first, pointer_words(pointers))

    def nbytes_of(self, param: Tensor) -> int:
        owner = on_disk_of(self._state.get(param))
        return 0 if owner is None else sum(one.nbytes for one in owner.described().values())

    def prepare(self, settings: Sequence[dict[str, Any]], pointers: array[int]) -> None:
        self._disk.check()
        self._disk.begin_change()
        self._done = False
        if not self._planned:
            self._lay_out(self._param_groups)
            self._planned = True
        self._find_gradients()
        starts = map(pointers.__getitem__, self._index)
        super().prepare(settings, array("Q", map(operator.add, starts, self._shifts)))

    def _find_gradients(self) -> None:
        """Where those are while nobody uses them, which come and leave with the records and rows that they are for."""
        if not self.survey.rests:
            self._gradients: list[list[Rest]] = [[]] * len(self._items)
            self._visits = Visits()
            return
        params = self.survey.params
        found = self.survey.gradient_rests
        self._gradients = []
        for item in self._items:
            own = (found[i] for i, _ in item.visits)
            self._gradients.append(list({id(rest): rest for rest in own if rest is not None}.values()))
        self._visits = Visits([rest_of(params[i]) for i in self._index], [found[i] for i in self._index])

    def run(self, scale: float) -> None:
        """The update, record by record. An error before the first of them is updated leaves everything as it was."""
        self._scale = scale
        try:
            with whole("the step"):
                if self._items:
                    flow(self._disk.ring, len(self._items), self._fetch, self._compute, self._store)
                self._run_loose(self._loose, self.table.nseg)
                self._done = True
        except BaseException:
            self._give_back()
            if self.torn:
                self.survey.cells.bump_versions()
            raise

    def take_turn(self, turn: int, scale: float) -> None:
        """Records of the next turns are on their way in meanwhile, those of the last ones on their way out."""
        self._scale = scale
        if self._flow is None and self._items:
            self._flow = flowing(self._disk.ring, len(self._items), self._fetch, self._compute, self._store)
        begun = self._ends[turn - 1] if turn else 0
        for _ in range(begun, self._ends[turn]):
            next(self._flow)  # type: ignore[arg-type]
        begin, end = self._loose_ends[turn : turn + 2]
        self._run_loose(begin, end)

    def _run_loose(self, begin: int, end: int) -> None:
        """Rows without state on disk."""
        if begin < end:
            try:
                for some in self._visits.of([(begin, end)]):
                    self.run_rows(self._scale, *some)
            finally:
                self._visits.end()

    def _give_back(self) -> None:
        """Parameters that came for an update that goes no further."""
        while self._borrowed:
            self._borrowed.pop().leave()

    def put_away(self) -> None:
        if self._flow is not None:
            next(self._flow, None)
            self._flow = None
        self._done = True

    def break_off(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None and getgeneratorstate(flow) != GEN_RUNNING:  # as it seems to in a forked child
            flow.close()
        self._give_back()

    @property
    def carried_out(self) -> bool:
        return self._done

    @property
    def torn(self) -> bool:
        """Whether the last update was broken off when a part of the parameters had been updated."""
        return self.begun and not self._done

    def _fetch(self, i: int, slot: Slot, after: Any) -> Any:
        record = self._items[i].record
        for rest in (*self._items[i].rests, *self._gradients[i]):
            rest.fetch()
            self._borrowed.append(rest)
        return self._disk.fetch(record, self._disk.view(slot, record), after) if record.stored else None

    def _compute(self, i: int, slot: Slot) -> None:
        item = self._items[i]
        for rest in item.rests:
            rest.wait()
            rest.change()
        for rest in self._gradients[i]:
            rest.wait()
        if item.record.unsettled:
            self._settle(item, slot)
        self.run_rows(self._scale, item.begin, item.end)

    def _settle(self, item: Item, slot: Slot) -> None:
        """Begin what is new in the record, and masters of parameters that were written from outside."""
        if not item.record.stored:
            self._disk.view(slot, item.record).zero_()
        for i, place in item.visits:
            owner = self._owners[i]
            if owner is not None and place in item.record.unsettled:
                parts = zip(owner.slots, owner.spans(place), strict=True)
                settle(
                    owner,
                    place,
                    [
                        slot.lease.tensor(column.dtype, (nbytes // column.dtype.itemsize,), offset=inside)
                        for column, (_, inside, _, nbytes) in parts
                    ],
                )

    def _store(self, i: int, slot: Slot) -> Any:
        record = self._items[i].record
        ticket = self._disk.store(record, self._disk.view(slot, record))
        for rest in (*self._items[i].rests, *self._gradients[i]):
            self._borrowed.remove(rest)
            rest.leave(awaited=rest in self._items[i].rests)  # by its forward
        if record.unsettled:
            for number, place in self._items[i].visits:
                place.begun = True
                record.unsettled.discard(place)
                self._owners[number].forget_exact()  # type: ignore[union-attr]
        return ticket
