"""The state of one optimizer on disk: room for it, and all of it read or written at once.

A parameter's tensors are spread over records, and small parameters share one. A record is one key of the Store; it is
fetched into a slot of the ring, and stored from there, without a copy.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import ZerokernError
from zerokern.io import Nvme, Store
from zerokern.memory import Arena, DevicePlace, Ring, Slot, Wanted, flow
from zerokern.optim.formats import Layout
from zerokern.optim.pieces import PAGE, plan
from zerokern.optim.records import OnDisk, Place, Record, copy_out, fill, settle

__all__ = ["SLOTS", "Disk"]

SLOTS = 8
# Two columns of 4 MiB side by side take turns on the same banks of memory: 0.61 ns per parameter, 0.56 with slots that
# are no power of two (fp32 Adam).
LARGE, SKEW = 4 << 20, 16 << 10
Visit = tuple[OnDisk, Place, dict[str, Tensor]]


class Disk:
    """Opens its Store and takes its memory when state is first made."""

    def __init__(self, tier: Nvme) -> None:
        nbytes = tier.ring_nbytes // SLOTS // PAGE * PAGE
        self.slot_nbytes = nbytes - SKEW if nbytes >= LARGE else nbytes
        self.tier = tier
        self.records: dict[str, Record] = {}
        self.ahead: dict[Record, tuple[Slot, Any]] = {}  # what is read for a save: slots of the ring, and tickets
        self.version = 0  # counts what may have changed records
        self._numbers = itertools.count()

    @property
    def is_open(self) -> bool:
        return hasattr(self, "store")

    def open(self) -> None:
        """Take memory for the ring, then the folder, which is refused where another job has it."""
        if not self.is_open:
            arena = Arena(SLOTS * self.slot_nbytes)
            ring = Ring(arena, SLOTS, self.slot_nbytes, "optimizer state")
            tier = self.tier
            try:
                self.store = Store(
                    tier.path, budget=tier.budget, engine=tier.engine, checksum=tier.checksum, arena=arena
                )
            except BaseException:
                _give_back(ring)
                raise
            self.ring = ring
            weakref.finalize(self, _give_back, ring).atexit = False

    def refuse_in_child(self) -> None:
        """In a forked child the ring's memory is not there, and an update would write to it all the same."""
        if self.is_open:
            self.ring.slots[0].lease.tensor(torch.uint8, (1,))

    def stop_reading(self) -> None:
        """Nothing is on its way into the ring that a save has yet to ask for."""
        while self.ahead:
            _, ticket = self.ahead.popitem()[1]
            if ticket is not None:
                with contextlib.suppress(ZerokernError):  # nobody has asked for it
                    ticket.wait()

    def begin_change(self) -> None:
        """Records are about to be written: what a save has read of them is of no more use, nor what it will read."""
        self.stop_reading()
        self.version += 1

    def view(self, slot: Slot, record: Record) -> Tensor:
        """The bytes that a record has in a slot."""
        return slot.lease.tensor(torch.uint8, (record.nbytes,))

    def make(self, wanted: Iterable[tuple[Tensor, Layout, float, bool]]) -> list[OnDisk]:
        """Room on disk for the state of these (parameter, layout, initial moment, first): all of it, or an error."""
        self.open()
        made = [OnDisk(self, *one) for one in wanted]
        pieces = plan([owner.shape.numel() for owner in made], [owner.widths for owner in made], self.slot_nbytes)
        taken: list[Record] = []
        try:
            for piece in pieces:
                record = Record(f"state/{next(self._numbers):06}", piece.nbytes)
                self.store.reserve(record.key, torch.uint8, (record.nbytes,))
                self.records[record.key] = record
                taken.append(record)
                for param, start, numel, offset in piece.segments:
                    made[param].places.append(Place(record, start, numel, offset))
        except BaseException as error:
            self.drop(taken)
            if isinstance(error, ZerokernError):
                error.args = (f"{error}\nThe state needs {sum(piece.nbytes for piece in pieces):,} bytes on disk",)
            raise
        return made

    def drop(self, records: Iterable[Record]) -> None:
        """Give their room back."""
        for record in list(records):
            record.dropped = True
            self.store.delete(record.key)
            del self.records[record.key]

    def sweep(self, owners: Iterable[OnDisk]) -> None:
        """Drop the records that hold state of none of these."""
        live = {id(place.record) for owner in owners for place in owner.places}
        self.drop([record for record in self.records.values() if id(record) not in live])

    def read(self, owners: Sequence[OnDisk]) -> list[dict[str, Tensor]]:
        """All tensors of each, by key, in memory of their own: as much memory as they have on disk."""
        described = [owner.described() for owner in owners]
        wanted = [Wanted(key, one.shape, one.dtype) for tensors in described for key, one in tensors.items()]
        cut = iter(DevicePlace(torch.device("cpu"), "optimizer state").take(wanted))
        made = [{key: next(cut) for key in tensors} for tensors in described]
        visits = _by_record(owners, made)
        stored = [record for record in visits if record.stored]

        def take(i: int, slot: Slot) -> None:
            for owner, place, tensors in visits[stored[i]]:
                copy_out(owner, place, slot.lease.ptr, tensors)

        self._flow(stored, take, lambda i, slot: None, fetched=True)
        for record, some in visits.items():
            for owner, place, tensors in some:
                if place in record.unsettled:
                    settle(owner, place, spans(owner, place, tensors))
        return made

    def write(self, owners: Sequence[OnDisk], entries: Sequence[dict[str, Any]]) -> None:
        """Write the tensors of the entries, which have been checked. Nothing else survives in the records written."""
        visits = _by_record(owners, entries)
        records = list(visits)
        last: dict[int, dict[str, Tensor]] = {}

        def put_together(i: int, slot: Slot) -> None:
            self.view(slot, records[i]).zero_()
            for owner, place, entry in visits[records[i]]:
                if id(owner) not in last:
                    last.clear()  # one parameter at a time: a copy may be needed to have it contiguous in host memory
                    last[id(owner)] = _contiguous(owner, entry)
                fill(owner, place, slot.lease.ptr, last[id(owner)])

        self._flow(records, put_together, lambda i, slot: self.store.put(records[i].key, self.view(slot, records[i])))
        for record, some in visits.items():
            record.stored = True
            record.unsettled.clear()
            for _, place, _ in some:
                place.begun = True

    def _flow(
        self,
        records: Sequence[Record],
        compute: Callable[[int, Slot], object],
        store: Callable[[int, Slot], Any],
        *,
        fetched: bool = False,
    ) -> None:
        self.stop_reading()
        self.version += not fetched

        def fetch(i: int, slot: Slot, after: Any) -> Any:
            return self.store.get(records[i].key, self.view(slot, records[i]), after=after) if fetched else None

        flow(self.ring, len(records), fetch, compute, store)


def _give_back(ring: Ring) -> None:
    """Leases and their arena refer to each other, so that memory would wait for the garbage collector."""
    with contextlib.suppress(ZerokernError):  # in a forked child, whose memory it is not
        arena = ring.arena
        ring.close()
        arena.close()


def spans(owner: OnDisk, place: Place, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The place's part of whole tensors, flat and in the order of `owner.slots`."""
    parts = zip(owner.slots, owner.widths, strict=True)
    flat = [(tensors[slot.key].view(-1), width.per) for slot, width in parts]
    return [whole[place.start // per : -(-(place.start + place.numel) // per)] for whole, per in flat]


def _by_record(owners: Sequence[OnDisk], entries: Sequence[dict[str, Any]]) -> dict[Record, list[Visit]]:
    visits: dict[Record, list[Visit]] = {}
    for owner, entry in zip(owners, entries, strict=True):
        for place in owner.places:
            visits.setdefault(place.record, []).append((owner, place, entry))
    return visits


def _contiguous(owner: OnDisk, entry: dict[str, Any]) -> dict[str, Tensor]:
    found = {slot.key: entry.get(slot.key) for slot in owner.slots}
    return {key: value.detach().to("cpu").contiguous() for key, value in found.items() if value is not None}
