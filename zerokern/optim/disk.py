"""Keeps optimizer state on disk: which records hold it, how updates stream it through a ring, and how all of it is read
or written at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, got
from zerokern.core.units import Piece
from zerokern.memory import DevicePool, Ring, TierConfig, Wanted, flowing
from zerokern.memory import Slot as Cell
from zerokern.memory.interrupts import whole
from zerokern.memory.ring import DeferredSignals
from zerokern.memory.stream import SLOTS, Record, Stream, slot_nbytes_of
from zerokern.optim.formats import ON_DISK, TAKES_LESS, Algorithm, Layout
from zerokern.optim.matrices import Matrix, is_cut
from zerokern.optim.records import LEAST_SLOT, OnDisk, RecordSpan, StateSpan, on_disk_of, records_of, state_span
from zerokern.optim.state import Checked, Entry, Exact, Row, StateTier, check_entries, make, pointer_words
from zerokern.optim.survey import Groups, names_of

__all__ = ["Disk", "RecordReader", "StateOnDisk", "check_slots", "records_to_fill"]

_BATCH = 256 << 20  # bytes of state that are in memory at once while it moves from records to other records
_CHANGED = "the optimizer has stepped, or was loaded, since its state was described for saving; save it again"


def check_slots(ring_nbytes: int, name: str) -> None:
    """Raises if slots are too small for matrices, whose records end where sums of squares do.

    >>> check_slots(64 << 20, "Muon")
    """
    if slot_nbytes_of(ring_nbytes) < LEAST_SLOT:
        raise ValueError(got("ring_nbytes", ring_nbytes, f"at least {SLOTS * LEAST_SLOT} bytes for {name}"))


class Disk(Stream):
    """Streams optimizer state through a ring, by parameter.

    `cut`: by the id of what is updated, shards of parameters whose matrices ranks have cut.
    """

    def __init__(self, config: TierConfig, name: str) -> None:
        super().__init__(config.open(name, "optimizer state"), config.ring_nbytes, "optimizer state")
        self.cut: Mapping[int, Any] = {}

    def hold(self, spans: Sequence[StateSpan]) -> None:
        """Reserves room for state that is made next, so that a full disk shows beforehand."""
        self.reserve([_wanted(nbytes) for _, nbytes in records_of(spans, self.slot_nbytes)])

    def make(self, wanted: Iterable[tuple[Tensor, Layout]]) -> list[OnDisk]:
        """Takes room on disk for the state of these (parameter, layout), or raises."""
        made = [OnDisk(self, *one) for one in wanted]
        spans = [state_span(self.cut.get(id(one.param)), one.shape.numel(), one.layout) for one in made]
        contents = records_of(spans, self.slot_nbytes)
        records = self.lay_out([_wanted(nbytes) for _, nbytes in contents])
        for record, (held, _) in zip(records, contents, strict=True):
            for span in held:
                span.put_in(record)
                made[span.span].places.append(span)
        return made

    def sweep(self, owners: Iterable[OnDisk]) -> None:
        """Drops the records that hold state of none of these."""
        live = {id(place.record) for owner in owners for place in owner.places}
        self.evict([record for record in self.records.values() if id(record) not in live])

    def read(self, owners: Sequence[OnDisk]) -> list[dict[str, Tensor]]:
        """Reads all tensors of each, by key, into memory of their own; none for moments that are yet to start."""
        described = [{k: v for k, v in one.described().items() if k not in one.first} for one in owners]
        wanted = [Wanted(key, one.shape, one.dtype) for tensors in described for key, one in tensors.items()]
        cut = iter(DevicePool(torch.device("cpu")).lay_out(wanted, "optimizer state", TAKES_LESS))
        made = [{key: next(cut) for key in tensors} for tensors in described]
        into = dict(zip(map(id, owners), made, strict=True))
        reader = RecordReader(self, owners)
        for record, spans in reader.spans.items():
            cell = reader.cell(record)
            for owner, place in spans:
                cells = owner.cells(place, cell)
                for key, part in owner.parts(place, into[id(owner)]).items():
                    part.copy_(cells[key])
        return made


def _wanted(nbytes: int) -> Wanted:
    return Wanted("state", torch.Size([nbytes]), torch.uint8)


def _spans_by_record(owners: Iterable[OnDisk]) -> dict[Record, list[tuple[OnDisk, RecordSpan]]]:
    found: dict[Record, list[tuple[OnDisk, RecordSpan]]] = {}
    for owner in owners:
        for place in owner.places:
            found.setdefault(place.record, []).append((owner, place))
    return found


class RecordReader:
    """Reads records through the ring, ahead of callers who ask for them in order."""

    def __init__(self, disk: Disk, owners: Iterable[OnDisk]) -> None:
        self.disk, self._version = disk, disk.version
        self.spans = _spans_by_record(owners)
        self._numbers = {record: number for number, record in enumerate(self.spans)}
        self._flow: Generator[int, None, None] | None = None
        self._first, self._at = 0, -1  # the turns of the record that it began with, and of the last one asked for
        self.expect(self.spans)

    def number(self, record: Record) -> int:
        """Returns the record's place in the order."""
        return self._numbers[record]

    def expect(self, records: Any) -> None:
        """Reads only these ahead: no others will be asked for."""
        self._flow = None
        wanted = set(records)
        self._order = [record for record in self.spans if record in wanted]
        self._turn = {record: turn for turn, record in enumerate(self._order)}

    def cell(self, record: Record) -> Cell:
        """Waits for a record and returns its cell, where it stays until the record after the next is asked for."""
        if self.disk.version != self._version:
            raise StateError(_CHANGED)
        turn = self._turn[record]
        if not self.disk.is_lent_to(self._flow) or not max(self._first, self._at - 1) <= turn <= self._at + 1:
            self._first, self._at = turn, turn - 1
            self._flow = self.disk.reading(_reading(self.disk, self._order[turn:], self.spans))
        if turn > self._at:
            flow, self._flow = self._flow, None  # what a read, or a Ctrl-C, breaks off is begun anew
            assert flow is not None
            with DeferredSignals():
                next(flow)
            self._flow, self._at = flow, turn
        cells = self.disk.ring.slots
        return cells[(turn - self._first) % len(cells)]


def _reading(
    disk: Disk, order: Sequence[Record], spans: Mapping[Record, Sequence[tuple[OnDisk, RecordSpan]]]
) -> Generator[int, None, None]:
    """Reads these records into the ring one after the other. A cell is filled again behind the next but one."""

    def fetch(i: int, cell: Cell, after: Any) -> Any:
        return disk.fetch(order[i], disk.view(cell, order[i]), after) if order[i].stored else None

    def settle(i: int, cell: Cell) -> None:
        record = order[i]
        if not record.stored:
            disk.view(cell, record).zero_()
        for owner, place in spans[record] if record.unsettled else ():
            if place in record.unsettled:
                owner.begin_span(place, cell)

    return flowing(disk.ring, len(order), fetch, settle, lambda i, cell: None, behind=2)


def records_to_fill(
    disk: Disk, owners: Iterable[OnDisk]
) -> Iterator[list[tuple[OnDisk, RecordSpan, dict[str, Tensor]]]]:
    """Writes whole records: yields lists of places and their tensors, all zeros, for the caller to fill before the next
    list. After the last one everything is on disk.

    Half of the ring's cells are filled while the other half is stored.
    """
    disk.begin_change()
    spans, leaving = _spans_by_record(owners), dict[int, Any]()
    slots, records = disk.ring.slots, list(spans)
    half = max(1, len(slots) // 2)

    def wait(slot: Cell) -> None:
        if (ticket := leaving.pop(slot.index, None)) is not None:
            ticket.wait()

    for turn, start in enumerate(range(0, len(records), half)):
        some = records[start : start + half]
        mine = [(record, slots[(turn % 2 * half + i) % len(slots)]) for i, record in enumerate(some)]
        parts: list[tuple[OnDisk, RecordSpan, dict[str, Tensor]]] = []
        for record, slot in mine:
            wait(slot)
            disk.view(slot, record).zero_()
            parts += [(owner, place, owner.cells(place, slot)) for owner, place in spans[record]]
        yield parts
        for owner, place, cells in parts:
            if "remainder" in cells and not owner.kept:
                owner.kept = bool(cells["remainder"].any())
            place.begun = True
        for record, slot in mine:
            leaving[slot.index] = disk.store(record, disk.view(slot, record))
            record.unsettled.clear()
    for slot in slots:
        wait(slot)


def all_on_disk(state: Mapping[Any, Any]) -> list[OnDisk]:
    """Returns all state on disk that a state refers to."""
    return [owner for entry in state.values() if (owner := on_disk_of(entry)) is not None]


def in_memory(disk: Disk, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Reads all tensors into memory of their own; keys have the order of state that never left it."""
    owners = all_on_disk(state)
    tensors = iter(disk.read(owners) if owners else ())
    return {key: entry if on_disk_of(entry) is None else _rest(entry) | next(tensors) for key, entry in state.items()}


def refuse_copy(state: Mapping[Any, Any]) -> None:
    """Refuses to copy state that lies on disk: it belongs to one optimizer."""
    for owner in all_on_disk(state):
        owner.__reduce__()


def described(disk: Disk, name: Callable[[], str], entry: Entry | None) -> Entry | None:
    """Returns the entry with tensors without memory for those on disk, so that it can be checked like any other."""
    owner = on_disk_of(entry)
    if entry is None or owner is None:
        return entry
    if owner.disk is not disk or owner.dropped:
        where = "no longer on disk" if owner.disk is disk else "on the disk of another optimizer"
        raise StateError(
            f"{name()}: its state is {where}; between optimizers, it moves with state_dict() and load_state_dict()"
        )
    both = [slot.key for slot in owner.slots if slot.key in entry]
    if both:
        everything = ", ".join(slot.key for slot in owner.slots)
        raise StateError(
            f"{name()}: state {both[0]!r} was assigned, and has a value on disk as well; change it in what "
            f"state_dict() returns and load that, or remove {ON_DISK!r} from the entry and assign all of {everything}"
        )
    return _rest(entry) | owner.described()


def make_room(disk: Disk, entries: Sequence[Checked], state: Mapping[Any, Any]) -> list[Entry]:
    """Makes entries with counters, and with room on disk: what a parameter has there if it fits, else new room."""
    known = [on_disk_of(state.get(param)) for param, _, _ in entries]
    fitting = [
        owner if owner is not None and layout.columns and owner.fits(disk, param, layout) else None
        for owner, (param, _, layout) in zip(known, entries, strict=True)
    ]
    new = [i for i, (_, _, layout) in enumerate(entries) if layout.columns and fitting[i] is None]
    made = disk.make([(entries[i][0], entries[i][2]) for i in new]) if new else []
    owners = {i: owner for i, owner in enumerate(fitting) if owner is not None} | dict(zip(new, made, strict=True))
    mine: list[Entry] = [{} for _ in entries]
    make([(param, one, slot) for (param, _, layout), one in zip(entries, mine, strict=True) for slot in layout.counter])
    for i, owner in owners.items():
        mine[i][ON_DISK] = owner
    return mine


def mark_loaded(mine: Sequence[Entry], entries: Sequence[Checked]) -> None:
    """Notes that the tensors of checked entries are about to be written to what `mine` have on disk."""
    for one, (_, entry, _) in zip(mine, entries, strict=True):
        owner = on_disk_of(one)
        if owner is not None:
            owner.first = frozenset(slot.key for slot in owner.slots if entry.get(slot.key) is None)
            owner.kept, owner.exact = False, None


def write_entries(disk: Disk, mine: Sequence[Entry], entries: Sequence[Checked]) -> None:
    """Writes the values of checked entries to where `mine` have room. Nothing else survives in those records."""
    sources = {id(owner): entry for one, (_, entry, _) in zip(mine, entries, strict=True) if (owner := on_disk_of(one))}
    last, full = None, {}
    with whole("writing optimizer state to disk"):
        for parts in records_to_fill(disk, filter(None, map(on_disk_of, mine))) if sources else ():
            for owner, place, cells in parts:
                if owner is not last:  # one parameter at a time: a copy may be needed to have it so in host memory
                    given = [(slot.key, sources[id(owner)].get(slot.key)) for slot in owner.slots]
                    last, full = owner, {k: v.detach().to("cpu").contiguous() for k, v in given if v is not None}
                for key, part in owner.parts(place, full).items():
                    cells[key].copy_(part)
    for one, (_, entry, _) in zip(mine, entries, strict=True):
        if "step" in one:
            one["step"].fill_(float(entry["step"]))


def move_to_disk(disk: Disk, entries: Sequence[Checked]) -> list[Entry]:
    """Moves checked entries of any kind to new records; what lies on disk is read and written again."""
    made: list[Entry] = []
    for batch in _batches(entries):
        read = in_memory(disk, {param: entry for param, entry, _ in batch})
        full = [(param, read[param], layout) for param, _, layout in batch]
        mine = make_room(disk, full, {})
        mark_loaded(mine, full)
        write_entries(disk, mine, full)
        made += mine
    return made


def _rest(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key != ON_DISK}


def _batches(entries: Sequence[Checked]) -> Iterator[list[Checked]]:
    sizes = (sum(slot.wanted(param).nbytes for slot in layout.columns) for param, _, layout in entries)
    for _, batch in groupby(zip(entries, accumulate(sizes), strict=True), key=lambda pair: pair[1] // _BATCH):
        yield [entry for entry, _ in batch]


class StateOnDisk(StateTier):
    """Keeps state in records on disk. An update reads them into a ring, changes them there and writes them back.

    What `placing` keeps in memory is what it is to a `StateTier`.
    """

    streams = True

    def __init__(
        self,
        algorithm: Algorithm,
        state: Any,
        initial: Sequence[float],
        exact: Exact | None,
        placing: Any,
        disk: Disk,
    ) -> None:
        """As `StateTier`. Nothing is written to the state on disk before there is room there for all of it."""
        super().__init__(algorithm, state, initial, exact, placing)
        self._disk = disk

    @property
    def ring(self) -> Ring | None:  # type: ignore[override]
        return self._disk.ring if self._disk.is_open else None

    def _knows(self, i: int) -> bool:
        param, layout = self.survey.params[i], self.survey.layouts[i]
        entry = self.state.get(param)
        owner = on_disk_of(entry)
        if self.state.mark.changed:
            return False
        if id(param) in self.rows:
            return super()._knows(i)
        if owner is None:
            return not layout.columns and (not layout.counter or (entry is not None and "step" in entry))
        return owner.fits(self._disk, param, layout)

    def add(self, groups: Groups, new: Sequence[int]) -> None:
        survey, disk, state = self.survey, self._disk, self.state
        entries = [state.get(survey.params[i]) or {} for i in new]
        seen = []
        for i, entry in zip(new, entries, strict=True):
            seen.append(described(disk, lambda i=i: names_of(groups)[survey.numbers[i]], entry))  # type: ignore[misc]
        check_entries(survey, groups, state, new, seen, self.algorithm.optional)
        sizes = [(survey.params[i], survey.layouts[i].nbytes_of(survey.params[i])) for i in new]
        far = [kind == "disk" for kind in self._placing.choose(state, sizes)]
        fresh: list[int] = []
        moving: list[tuple[int, Entry]] = []
        for i, entry, gone in zip(new, entries, far, strict=True):
            layout, owner = survey.layouts[i], on_disk_of(entry)
            if not gone:
                continue
            self.rows.pop(id(survey.params[i]), None)  # it had no state until now
            same = owner is not None and {*layout.columns} <= {*owner.slots}
            if owner is not None and same and owner.layout.matrices == layout.matrices:
                owner.param, owner.layout = survey.params[i], layout
            elif owner is not None or any(entry.get(slot.key) is not None for slot in layout.columns):
                moving.append((i, entry))
            elif not entry.keys() >= {slot.key for slot in layout.slots}:
                fresh.append(i)
        if moving:
            wanted = [(survey.params[i], entry, survey.layouts[i]) for i, entry in moving]
            self._put(moving, move_to_disk(disk, wanted))
        if fresh:
            self._put([(i, state.get(survey.params[i]) or {}) for i in fresh], self._made(fresh))
        # last: a disk may be too small, and rows that were made for nothing would not be known for new ones
        if near := [i for i, gone in zip(new, far, strict=True) if not gone]:
            self._keep(near)

    def _made(self, fresh: Sequence[int]) -> list[Entry]:
        """Makes entries for parameters without state, with room on disk for all of it."""
        survey, optional = self.survey, self.algorithm.optional
        entries = make_room(self._disk, [(survey.params[i], {}, survey.layouts[i]) for i in fresh], {})
        for i, owner in zip(fresh, map(on_disk_of, entries), strict=True):
            if owner is None:
                continue
            owner.initial = self._initial[survey.owners[i]]
            owner.first = optional.intersection(slot.key for slot in owner.slots)
            if self._exact is not None and owner.has_master:
                owner.begin_with(self._exact(survey.params[i], kept=True))
        return entries

    def _put(self, old: Sequence[tuple[int, Entry]], new: Sequence[Entry]) -> None:
        """Replaces entries by others, and keeps values under keys that are not ours."""
        for (i, was), entry in zip(old, new, strict=True):
            ours = {ON_DISK, *(slot.key for slot in self.survey.layouts[i].slots)}
            others = {key: value for key, value in was.items() if key not in ours}
            self.state[self.survey.params[i]] = {**entry, **others}

    def locate(self) -> None:
        super().locate()
        self._owners = [on_disk_of(self.state.get(param)) for param in self.survey.params]
        self.begins_without_rows = any(one is not None and one.first and not one.places for one in self._owners)
        if self.state.mark.changed:
            self._disk.sweep(all_on_disk(self.state))

    def check(self) -> None:
        self._disk.check()
        self._disk.begin_change()

    def places(self, i: int) -> Sequence[Any]:
        owner = self._owners[i]
        if owner is None:
            return super().places(i)
        return [*owner.places, *(one for one in super().places(i) if is_cut(one))]

    def has_records_of(self, i: int) -> bool:
        cut = self.survey.matrices[i] if self.survey.matrices else ()  # rounds hang on records, other ranks' too
        return self._owners[i] is not None or any(is_cut(one) for one in cut)

    def row(self, i: int, place: RecordSpan | Matrix | Piece, base: int) -> Row:
        survey, owner = self.survey, self._owners[i]
        if id(survey.params[i]) in self.rows:
            return super().row(i, place, base)
        layout = survey.layouts[i]
        pointers = {layout.param_column: survey.param_pointers[i] + place.start * layout.param_dtype.itemsize}
        if isinstance(place, RecordSpan):
            for slot, offset in zip(place.slots, place.offsets, strict=True):
                pointers.setdefault(slot.column, base + offset)
        return Row(layout, owner is not None and bool(owner.first), pointer_words(pointers))

    def fetch(self, record: Record | None, cell: Cell, after: Any) -> Any:
        if record is None or not record.stored:
            return None
        return self._disk.fetch(record, self._disk.view(cell, record), after)

    def begin(self, record: Record | None, cell: Cell, members: Sequence[tuple[int, Any]]) -> None:
        if record is None or not record.unsettled:
            return
        if not record.stored:
            self._disk.view(cell, record).zero_()
        for i, place in members:
            owner = self._owners[i]
            if owner is not None and place in record.unsettled:
                owner.begin_span(place, cell)

    def store(self, record: Record | None, cell: Cell, members: Sequence[tuple[int, Any]]) -> Any:
        if record is None:
            return None
        ticket = self._disk.store(record, self._disk.view(cell, record))
        for i, place in [one for one in members if one[1] in record.unsettled]:
            place.begun = True
            record.unsettled.discard(place)
            self._owners[i].forget_exact()  # type: ignore[union-attr]
        return ticket

    def started(self) -> None:
        super().started()
        self.begins_without_rows = False
        for owner in self._owners:
            if owner is not None:
                owner.first = frozenset()

    def nbytes_of(self, param: Tensor) -> int:
        owner = on_disk_of(self.state.get(param))
        return super().nbytes_of(param) if owner is None else owner.nbytes
