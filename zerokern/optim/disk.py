"""The state of one optimizer on disk: room for it, and all of it read or written at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.io import Nvme
from zerokern.io.pieces import Piece, Width, plan
from zerokern.io.place import NvmePlace, Record
from zerokern.memory import DevicePlace, Slot, Wanted
from zerokern.optim.formats import TAKES_LESS, Layout
from zerokern.optim.records import OnDisk, Stretch, copy_out, fill, settle

__all__ = ["Disk"]

Visit = tuple[OnDisk, Stretch, dict[str, Tensor]]


class Disk(NvmePlace):
    """The place on disk, which tells parameters' states apart."""

    def __init__(self, tier: Nvme) -> None:
        super().__init__(tier, "optimizer state")

    def hold(self, spans: Sequence[tuple[int, tuple[Width, ...]]]) -> None:
        """Room for state that is made next, by elements and columns: a disk that is too small shows beforehand."""
        self.reserve([_wanted(piece) for piece in self._cut(spans)])

    def _cut(self, spans: Sequence[tuple[int, tuple[Width, ...]]]) -> list[Piece]:
        return plan([numel for numel, _ in spans], [widths for _, widths in spans], self.slot_nbytes)

    def make(self, wanted: Iterable[tuple[Tensor, Layout, float, bool]]) -> list[OnDisk]:
        """Room on disk for the state of these (parameter, layout, initial moment, first): all of it, or an error."""
        made = [OnDisk(self, *one) for one in wanted]
        pieces = self._cut([(one.shape.numel(), one.widths) for one in made])
        for record, piece in zip(self.lay_out([_wanted(piece) for piece in pieces]), pieces, strict=True):
            for param, start, numel, offset in piece.segments:
                made[param].places.append(Stretch(record, start, numel, offset))
        return made

    def sweep(self, owners: Iterable[OnDisk]) -> None:
        """Drop the records that hold state of none of these."""
        live = {id(place.record) for owner in owners for place in owner.places}
        self.evict([record for record in self.records.values() if id(record) not in live])

    def read(self, owners: Sequence[OnDisk]) -> list[dict[str, Tensor]]:
        """All tensors of each, by key, in memory of their own: as much memory as they have on disk."""
        described = [owner.described() for owner in owners]
        wanted = [Wanted(key, one.shape, one.dtype) for tensors in described for key, one in tensors.items()]
        cut = iter(DevicePlace(torch.device("cpu"), "optimizer state", TAKES_LESS).lay_out(wanted))
        made = [{key: next(cut) for key in tensors} for tensors in described]
        visits = _by_record(owners, made)

        def take(record: Record, slot: Slot) -> None:
            for owner, place, tensors in visits[record]:
                copy_out(owner, place, slot.lease.ptr, tensors)

        self.read_through([record for record in visits if record.stored], take)
        for record, some in visits.items():
            for owner, place, tensors in some:
                if place in record.unsettled:
                    settle(owner, place, spans(owner, place, tensors))
        return made

    def write(self, owners: Sequence[OnDisk], entries: Sequence[dict[str, Any]]) -> None:
        """Write the tensors of the entries, which have been checked. Nothing else survives in the records written."""
        visits = _by_record(owners, entries)
        last: dict[int, dict[str, Tensor]] = {}

        def put_together(record: Record, slot: Slot) -> None:
            self.view(slot, record).zero_()
            for owner, place, entry in visits[record]:
                if id(owner) not in last:
                    last.clear()  # one parameter at a time: a copy may be needed to have it contiguous in host memory
                    last[id(owner)] = _contiguous(owner, entry)
                fill(owner, place, slot.lease.ptr, last[id(owner)])

        self.write_through(list(visits), put_together)
        for record, some in visits.items():
            record.unsettled.clear()
            for _, place, _ in some:
                place.begun = True


def _wanted(piece: Piece) -> Wanted:
    return Wanted("state", torch.Size([piece.nbytes]), torch.uint8)


def spans(owner: OnDisk, place: Stretch, tensors: dict[str, Tensor]) -> list[Tensor]:
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
