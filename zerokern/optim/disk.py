"""Keeps optimizer state on disk: which records hold it, how updates stream it through a ring, and how all of it is read
or written at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.io.pieces import Piece, Width, columns, plan
from zerokern.kernels.formats import BLOCK
from zerokern.memory import DeviceTier, Ring, TierConfig, Wanted
from zerokern.memory import Slot as Cell
from zerokern.memory.interrupts import whole
from zerokern.memory.stream import Record, Stream
from zerokern.optim.formats import ON_DISK, TAKES_LESS, Algorithm, Layout, Slot
from zerokern.optim.state import (
    Checked,
    Entry,
    Exact,
    SpanRow,
    StateTier,
    begin,
    check_entries,
    exact_of,
    make,
    pointer_words,
)
from zerokern.optim.survey import Groups, Survey, names_of
from zerokern.zero.kinds import present

__all__ = [
    "Disk",
    "OnDisk",
    "RecordSpan",
    "StateOnDisk",
    "all_on_disk",
    "begin_span",
    "begin_with",
    "cells_of",
    "described",
    "in_memory",
    "move_to_disk",
    "on_disk_of",
    "refuse_copy",
    "rooms_for",
    "write_entries",
]  # fmt: skip

_PIECE = 1 << 18  # elements that are rounded at once
_BATCH = 256 << 20  # bytes of state that are in memory at once while it moves from records to other records


class RecordSpan:
    """Says where the state of a span of one parameter lies within a record."""

    __slots__ = ("begun", "numel", "offset", "record", "start")

    def __init__(self, record: Record, start: int, numel: int, offset: int) -> None:
        self.record, self.start, self.numel, self.offset = record, start, numel, offset
        self.begun = False
        record.unsettled.add(self)


class OnDisk:
    """Takes the place in `optimizer.state` of one parameter's tensors that lie on disk; `state_dict` reads them back.

    `initial`: what moments begin with. `first`: a moment is yet to start from the gradient. `kept`: remainders were
    loaded that are not all zero. `exact`: what is kept of the fp32 values that the parameter began with, for places yet
    to begin.
    """

    __slots__ = ("exact", "first", "home", "initial", "kept", "layout", "param", "places", "shape", "slots", "widths")

    def __init__(self, home: object, param: Tensor, layout: Layout, initial: float, first: bool) -> None:
        self.home, self.param, self.layout, self.shape = home, param, layout, param.shape
        self.slots = layout.columns
        self.widths = tuple(Width(slot.dtype.itemsize, BLOCK if slot.extent == "blocks" else 1) for slot in self.slots)
        self.initial, self.first, self.kept = initial, first, False
        self.exact: Tensor | None = None
        self.places: list[RecordSpan] = []

    @property
    def has_master(self) -> bool:
        return any(slot.column in ("master", "remainder") for slot in self.slots)

    @property
    def dropped(self) -> bool:
        return any(place.record.dropped for place in self.places)

    def fits(self, home: object, param: Tensor, layout: Layout) -> bool:
        """Whether this is the state of that parameter as it is now, so that nothing is left to check."""
        same = self.home is home and self.param is param and self.layout is layout and self.shape == param.shape
        return same and not self.dropped

    def described(self) -> dict[str, Tensor]:
        """Returns tensors without memory that have the dtypes and shapes of those on disk."""
        numel = self.shape.numel()
        shapes = {"param": self.shape, "blocks": torch.Size([-(-numel // BLOCK)])}
        return {s.key: torch.empty(shapes[s.extent], dtype=s.dtype, device="meta") for s in self.slots}

    def begin_anew(self, *, loaded: bool) -> bool:
        """Marks masters to be made from the parameter when they are next fetched. Returns whether that drops loaded
        remainders."""
        for place in self.places:
            place.record.unsettled.add(place)
        self.exact = None
        lost, self.kept = loaded and self.kept, False
        return lost

    def forget_exact(self) -> None:
        """Drops the exact first values once every place has been given its own."""
        if self.exact is not None and all(place.begun for place in self.places):
            self.exact = None

    def spans(self, place: RecordSpan) -> Iterable[tuple[Slot, int, int, int]]:
        """Yields each tensor's part in a place: (slot, offset in the record, offset in the whole tensor, bytes)."""
        offsets, _ = columns(self.widths, place.numel)
        for slot, width, offset in zip(self.slots, self.widths, offsets, strict=True):
            nbytes = -(-place.numel // width.per) * width.nbytes
            yield slot, place.offset + offset, place.start // width.per * width.nbytes, nbytes

    def __repr__(self) -> str:
        nbytes = sum(part[3] for place in self.places for part in self.spans(place))
        return f"OnDisk({', '.join(slot.key for slot in self.slots)}: {nbytes:,} bytes; read by state_dict())"

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "optimizer state on disk cannot be copied or pickled: two optimizers would write the same records. Take "
            "optimizer.state_dict(), which reads it back, and load that into an optimizer with a folder of its own"
        )


def on_disk_of(entry: Any) -> OnDisk | None:
    """Returns the part of a state entry that lies on disk, if there is one."""
    found = entry.get(ON_DISK) if isinstance(entry, dict) else None
    return found if isinstance(found, OnDisk) else None


def read_span(owner: OnDisk, place: RecordSpan, base: int, tensors: dict[str, Tensor]) -> None:
    """Copies a place from a record at address `base` to whole, contiguous tensors by key."""
    for slot, inside, at, nbytes in owner.spans(place):
        ctypes.memmove(tensors[slot.key].data_ptr() + at, base + inside, nbytes)


def write_span(owner: OnDisk, place: RecordSpan, base: int, tensors: dict[str, Tensor]) -> None:
    """Copies a place to a record at address `base`; what has no tensor stays as it is."""
    for slot, inside, at, nbytes in owner.spans(place):
        if slot.key in tensors:
            ctypes.memmove(base + inside, tensors[slot.key].data_ptr() + at, nbytes)


def begin_span(owner: OnDisk, place: RecordSpan, tensors: Sequence[Tensor]) -> None:
    """Writes first values to the span's tensors, flat and in the order of `owner.slots`; or new masters, once it has
    begun."""
    with present(owner.param, written=owner.exact is not None):
        _begin_span(owner, place, tensors)


def _begin_span(owner: OnDisk, place: RecordSpan, tensors: Sequence[Tensor]) -> None:
    mine = slice(place.start, place.start + place.numel)
    param = owner.param.detach().reshape(-1)[mine].to("cpu")  # which a frozen one on a device is not
    kept = None if owner.exact is None or place.begun else owner.exact.view(-1)[mine]
    for slot, tensor in zip(owner.slots, tensors, strict=True):
        if slot.key == "master":
            if place.begun:
                torch.where(tensor.to(param.dtype) == param, tensor, param.float(), out=tensor)
            else:
                begin(param, slot, tensor, None if kept is None else exact_of(param, kept))
        elif slot.key == "remainder":
            if kept is not None and kept.dtype is slot.dtype:
                tensor.copy_(kept)
            else:
                begin(param, slot, tensor.zero_(), None if kept is None else exact_of(param, kept))
        elif not place.begun:
            tensor.fill_(owner.initial if slot.extent == "param" else 0.0)


@torch.no_grad()
def begin_with(owner: OnDisk, kept: Tensor | None) -> None:
    """Keeps what is left of the fp32 values that the parameter was rounded from, until its places begin with them.

    Rounded to 24 bits some of them are nearer to the next bf16: the parameter becomes that at once, as it does where
    state lies in memory.
    """
    short = next((slot for slot in owner.slots if slot.key == "remainder" and slot.dtype is torch.int8), None)
    owner.exact = kept
    if kept is None or short is None:
        return
    owner.exact = torch.empty(kept.numel(), dtype=short.dtype, device=kept.device)
    with present(owner.param, written=True):
        columns = (owner.param.detach().view(-1), kept.view(-1), owner.exact)
        for param, old, new in zip(*(one.split(_PIECE) for one in columns), strict=True):
            begin(param, short, new, exact_of(param, old))


Visit = tuple[OnDisk, RecordSpan, dict[str, Tensor]]


class Disk(Stream):
    """Streams optimizer state through a ring, by parameter."""

    def __init__(self, config: TierConfig, name: str) -> None:
        super().__init__(config.open(name, "optimizer state"), config.ring_nbytes, "optimizer state")

    def hold(self, spans: Sequence[tuple[int, tuple[Width, ...]]]) -> None:
        """Reserves room for state that is made next, by elements and columns, so that a full disk shows beforehand."""
        self.reserve([_wanted(piece) for piece in self._cut(spans)])

    def _cut(self, spans: Sequence[tuple[int, tuple[Width, ...]]]) -> list[Piece]:
        return plan([numel for numel, _ in spans], [widths for _, widths in spans], self.slot_nbytes)

    def make(self, wanted: Iterable[tuple[Tensor, Layout, float, bool]]) -> list[OnDisk]:
        """Takes room on disk for the state of these (parameter, layout, initial moment, first), or raises."""
        made = [OnDisk(self, *one) for one in wanted]
        pieces = self._cut([(one.shape.numel(), one.widths) for one in made])
        for record, piece in zip(self.lay_out([_wanted(piece) for piece in pieces]), pieces, strict=True):
            for param, start, numel, offset in piece.segments:
                made[param].places.append(RecordSpan(record, start, numel, offset))
        return made

    def sweep(self, owners: Iterable[OnDisk]) -> None:
        """Drops the records that hold state of none of these."""
        live = {id(place.record) for owner in owners for place in owner.places}
        self.evict([record for record in self.records.values() if id(record) not in live])

    def read(self, owners: Sequence[OnDisk]) -> list[dict[str, Tensor]]:
        """Reads all tensors of each, by key, into memory of their own: as much as they have on disk."""
        described = [owner.described() for owner in owners]
        wanted = [Wanted(key, one.shape, one.dtype) for tensors in described for key, one in tensors.items()]
        cut = iter(DeviceTier(torch.device("cpu"), "optimizer state", TAKES_LESS).lay_out(wanted))
        made = [{key: next(cut) for key in tensors} for tensors in described]
        visits = _by_record(owners, made)

        def take(record: Record, slot: Cell) -> None:
            for owner, place, tensors in visits[record]:
                read_span(owner, place, slot.lease.ptr, tensors)

        self.read_through([record for record in visits if record.stored], take)
        for record, some in visits.items():
            for owner, place, tensors in some:
                if place in record.unsettled:
                    begin_span(owner, place, spans(owner, place, tensors))
        return made

    def write(self, owners: Sequence[OnDisk], entries: Sequence[dict[str, Any]]) -> None:
        """Writes the tensors of the entries, which have been checked. Nothing else survives in the records written."""
        visits = _by_record(owners, entries)
        last: dict[int, dict[str, Tensor]] = {}

        def put_together(record: Record, slot: Cell) -> None:
            self.view(slot, record).zero_()
            for owner, place, entry in visits[record]:
                if id(owner) not in last:
                    last.clear()  # one parameter at a time: a copy may be needed to have it contiguous in host memory
                    last[id(owner)] = _contiguous(owner, entry)
                write_span(owner, place, slot.lease.ptr, last[id(owner)])

        self.write_through(list(visits), put_together)
        for record, some in visits.items():
            record.unsettled.clear()
            for _, place, _ in some:
                place.begun = True


def _wanted(piece: Piece) -> Wanted:
    return Wanted("state", torch.Size([piece.nbytes]), torch.uint8)


def spans(owner: OnDisk, place: RecordSpan, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Returns the place's part of whole tensors, flat and in the order of `owner.slots`."""
    parts = zip(owner.slots, owner.widths, strict=True)
    flat = [(tensors[slot.key].view(-1), width.per) for slot, width in parts]
    return [whole[place.start // per : -(-(place.start + place.numel) // per)] for whole, per in flat]


def cells_of(owner: OnDisk, place: RecordSpan, cell: Cell) -> list[Tensor]:
    """Returns the tensors of a place, 1-D, where they lie in a cell of the ring."""
    return [
        cell.lease.tensor(column.dtype, (nbytes // column.dtype.itemsize,), offset=inside)
        for column, inside, _, nbytes in owner.spans(place)
    ]


def _by_record(owners: Sequence[OnDisk], entries: Sequence[dict[str, Any]]) -> dict[Record, list[Visit]]:
    visits: dict[Record, list[Visit]] = {}
    for owner, entry in zip(owners, entries, strict=True):
        for place in owner.places:
            visits.setdefault(place.record, []).append((owner, place, entry))
    return visits


def _contiguous(owner: OnDisk, entry: dict[str, Any]) -> dict[str, Tensor]:
    found = {slot.key: entry.get(slot.key) for slot in owner.slots}
    return {key: value.detach().to("cpu").contiguous() for key, value in found.items() if value is not None}


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
    if owner.home is not disk or owner.dropped:
        where = "no longer on disk" if owner.home is disk else "on the disk of another optimizer"
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


def rooms_for(disk: Disk, entries: Sequence[Checked], state: Mapping[Any, Any]) -> list[OnDisk | None]:
    """Returns room for the tensors of checked entries: what their parameters have where it fits, else new room."""
    owners: list[OnDisk | None] = []
    new: list[int] = []
    for i, (param, _, layout) in enumerate(entries):
        owner = on_disk_of(state.get(param))
        if not layout.columns or owner is None or not owner.fits(disk, param, layout):
            owner = None
            new += [i] if layout.columns else []
        owners.append(owner)
    made = disk.make([(entries[i][0], entries[i][2], 0.0, False) for i in new]) if new else []
    for i, one in zip(new, made, strict=True):
        owners[i] = one
    return owners


def write_entries(
    disk: Disk, owners: Sequence[OnDisk | None], entries: Sequence[Checked], algorithm: Algorithm
) -> list[Entry]:
    """Writes the tensors of checked entries; returns what `optimizer.state` holds in their place."""
    there = [(owner, entry) for owner, (_, entry, _) in zip(owners, entries, strict=True) if owner is not None]
    if there:
        with whole("writing optimizer state to disk"):
            disk.write([owner for owner, _ in there], [entry for _, entry in there])
    for owner, entry in there:
        owner.first = any(slot.key in algorithm.optional and entry.get(slot.key) is None for slot in owner.slots)
        remainder = entry.get("remainder")
        owner.kept = remainder is not None and bool(remainder.any())
    mine: list[Entry] = [{} for _ in entries]
    make([(param, one, slot) for (param, _, layout), one in zip(entries, mine, strict=True) for slot in layout.counter])
    for (_, entry, _), one, stand_in in zip(entries, mine, owners, strict=True):
        if "step" in one:
            one["step"].fill_(float(entry["step"]))
        if stand_in is not None:
            one[ON_DISK] = stand_in
    return mine


def move_to_disk(disk: Disk, entries: Sequence[Checked], algorithm: Algorithm) -> list[Entry]:
    """Moves checked entries of any kind to new records; what lies on disk is read and written again."""
    mine: list[Entry] = []
    for batch in _batches(entries):
        owners = [owner for _, entry, _ in batch if (owner := on_disk_of(entry)) is not None]
        tensors = iter(disk.read(owners) if owners else ())
        full = [(p, e if on_disk_of(e) is None else _rest(e) | next(tensors), layout) for p, e, layout in batch]
        mine += write_entries(disk, rooms_for(disk, full, {}), full, algorithm)
    return mine


def _rest(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key != ON_DISK}


def _batches(entries: Sequence[Checked]) -> Iterator[list[Checked]]:
    batch: list[Checked] = []
    nbytes = 0
    for one in entries:
        batch.append(one)
        nbytes += sum(slot.shape(one[0]).numel() * slot.dtype.itemsize for slot in one[2].columns)
        if nbytes >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class StateOnDisk(StateTier):
    """Keeps state in records on disk. An update reads them into a ring, changes them there and writes them back."""

    streams = True

    def __init__(
        self,
        algorithm: Algorithm,
        state: Any,
        initial: Sequence[float],
        exact: Exact | None,
        disk: Disk,
    ) -> None:
        """As `StateTier`. Nothing is written to the state before there is room on disk for all of it."""
        super().__init__(algorithm, state, initial, exact)
        self._disk = disk

    @property
    def ring(self) -> Ring | None:  # type: ignore[override]
        return self._disk.ring if self._disk.is_open else None

    def find(self, survey: Survey, previous: StateTier | None) -> list[int]:
        self.survey = survey
        return [i for i in range(len(survey.params)) if not self._knows(i)]

    def _knows(self, i: int) -> bool:
        param, layout = self.survey.params[i], self.survey.layouts[i]
        entry = self.state.get(param)
        owner = on_disk_of(entry)
        if self.state.mark.changed:
            return False
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
        fresh: list[int] = []
        moving: list[tuple[int, Entry]] = []
        for i, entry in zip(new, entries, strict=True):
            layout, owner = survey.layouts[i], on_disk_of(entry)
            if owner is not None and {*layout.columns} <= {*owner.slots}:
                owner.param, owner.layout = survey.params[i], layout
            elif owner is not None or any(entry.get(slot.key) is not None for slot in layout.columns):
                moving.append((i, entry))
            elif not entry.keys() >= {slot.key for slot in layout.slots}:
                fresh.append(i)
        if moving:
            wanted = [(survey.params[i], entry, survey.layouts[i]) for i, entry in moving]
            self._put(moving, move_to_disk(disk, wanted, self.algorithm))
        if fresh:
            self._put([(i, state.get(survey.params[i]) or {}) for i in fresh], self._made(fresh))

    def _made(self, fresh: Sequence[int]) -> list[Entry]:
        """Makes entries for parameters without state, with room on disk for all of it."""
        survey, optional = self.survey, self.algorithm.optional
        stored = [i for i in fresh if survey.layouts[i].columns]
        wanted = []
        for i in stored:
            layout = survey.layouts[i]
            first = any(slot.key in optional for slot in layout.columns)
            wanted.append((survey.params[i], layout, self._initial[survey.owners[i]], first))
        owners = dict(zip(stored, self._disk.make(wanted) if wanted else (), strict=True))
        for i, owner in owners.items():
            if self._exact is not None and owner.has_master:
                begin_with(owner, self._exact(survey.params[i]))
                self._exact(survey.params[i], kept=True)
        entries: list[Entry] = [{ON_DISK: owners[i]} if i in owners else {} for i in fresh]
        pairs = zip(fresh, entries, strict=True)
        make([(survey.params[i], entry, slot) for i, entry in pairs for slot in survey.layouts[i].counter])
        return entries

    def _put(self, old: Sequence[tuple[int, Entry]], new: Sequence[Entry]) -> None:
        """Puts entries in the place of others; what an entry holds beside our own keys stays in it."""
        for (i, was), entry in zip(old, new, strict=True):
            ours = {ON_DISK, *(slot.key for slot in self.survey.layouts[i].slots)}
            others = {key: value for key, value in was.items() if key not in ours}
            self.state[self.survey.params[i]] = {**entry, **others}

    def locate(self) -> None:
        self._owners = [on_disk_of(self.state.get(param)) for param in self.survey.params]
        if self.state.mark.changed:
            self._disk.sweep(all_on_disk(self.state))

    def in_place(self) -> bool:
        return True

    def check(self) -> None:
        self._disk.check()
        self._disk.begin_change()

    def spans(self, i: int) -> Sequence[tuple[Any, Any, int, int]]:
        owner = self._owners[i]
        if owner is None:
            return [(None, None, 0, self.survey.numels[i])]
        return [(place.record, place, place.start, place.numel) for place in owner.places]

    def row(self, i: int, place: RecordSpan | None, cell: Cell) -> SpanRow:
        survey, owner = self.survey, self._owners[i]
        layout = survey.layouts[i]
        start = 0 if place is None else place.start
        pointers = {layout.param_column: survey.param_pointers[i] + start * survey.param_dtypes[i].itemsize}
        if owner is not None and place is not None:
            for column, inside, _, _ in owner.spans(place):
                pointers.setdefault(column.column, cell.lease.ptr + inside)
        return SpanRow(layout, owner is not None and owner.first, pointer_words(pointers))

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
                begin_span(owner, place, cells_of(owner, place, cell))

    def store(self, record: Record | None, cell: Cell, members: Sequence[tuple[int, Any]]) -> Any:
        if record is None:
            return None
        ticket = self._disk.store(record, self._disk.view(cell, record))
        for i, place in members if record.unsettled else ():
            place.begun = True
            record.unsettled.discard(place)
            self._owners[i].forget_exact()  # type: ignore[union-attr]
        return ticket

    def started(self) -> None:
        for owner in self._owners:
            if owner is not None:
                owner.first = False

    def nbytes_of(self, param: Tensor) -> int:
        owner = on_disk_of(self.state.get(param))
        return 0 if owner is None else sum(one.nbytes for one in owner.described().values())
