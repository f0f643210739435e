"""Streams parts of a tier through a ring buffer: fetched into a slot of host memory, used there, stored from there."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import ZerokernError
from zerokern.memory.arena import PAGE, Arena
from zerokern.memory.ring import DeferredSignals, Ring, Slot
from zerokern.memory.staging import Ticket
from zerokern.memory.tier import OpenedTier, Wanted

__all__ = ["SLOTS", "Record", "Stream", "slot_nbytes_of"]

SLOTS = 8
# Two columns of 4 MiB side by side take turns on the same banks of memory: 0.61 ns per parameter, 0.56 with slots that
# are no power of two (fp32 Adam).
LARGE, SKEW = 4 << 20, 16 << 10


def slot_nbytes_of(ring_nbytes: int) -> int:
    """Returns the size of the slots of a ring of so many bytes.

    >>> slot_nbytes_of(2 << 20), slot_nbytes_of(64 << 20)
    (262144, 8372224)
    """
    nbytes = ring_nbytes // SLOTS // PAGE * PAGE
    return nbytes - SKEW if nbytes >= LARGE else nbytes


class Record:
    """A part that passes through the ring: bytes, whose meaning only its owner knows."""

    __slots__ = ("dropped", "part", "stored", "unsettled", "wanted")

    def __init__(self, part: Any, wanted: Wanted) -> None:
        self.part, self.wanted = part, wanted
        self.stored = False  # its contents are on their way to the tier, or there
        self.dropped = False
        self.unsettled: set[Any] = set()  # spans to be begun, or put in order, before they are next used

    @property
    def nbytes(self) -> int:
        return self.wanted.nbytes


class Stream:
    """A tier and its ring buffer, both of which are opened when room is first requested.

    >>> import tempfile; from zerokern.io import Nvme
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stream = Stream(Nvme(folder).open("", "example"), 1 << 20, "example")
    ...     (record,) = stream.lay_out([Wanted("cargo", torch.Size([1000]), torch.float32)])
    ...     values = stream.view(stream.ring.slots[0], record)
    ...     stream.store(record, values.fill_(1.0)).wait()
    ...     stream.fetch(record, values.zero_()).wait(); print(values.sum())
    tensor(1000.)
    """

    def __init__(self, tier: OpenedTier[Any], ring_nbytes: int, owner: str) -> None:
        """`owner`: who takes the memory."""
        self.slot_nbytes = slot_nbytes_of(ring_nbytes)
        self.tier, self._owner = tier, owner
        self.records: dict[int, Record] = {}  # by id
        self._reading: weakref.ref[Generator[int, None, None]] | None = None  # its reader's, which keeps it
        self.version = 0  # counts what may have changed records
        self._reserved: list[Record] = []  # room for what is about to be laid out
        self._closed = False

    @property
    def is_open(self) -> bool:
        return hasattr(self, "ring") and not self._closed

    def open(self) -> None:
        """Allocates the ring, then opens the tier."""
        if self.is_open or self._closed:
            self.tier.open()  # which says why it is closed
            return
        ring = Ring(Arena(SLOTS * self.slot_nbytes), SLOTS, self.slot_nbytes, self._owner)
        self.tier.open(ring.arena)
        self.ring = ring

    def close(self, because: str) -> None:
        """Closes the tier and frees the ring; nothing is kept. Later uses raise with the reason."""
        opened, self._closed = self.is_open, True
        if opened:
            self._stop_reading()
        self.tier.close(because)
        if opened:
            with contextlib.suppress(ZerokernError):  # in a forked child, whose memory it is not
                self.ring.close()
                self.ring.arena.close()

    def check(self) -> None:
        """Raises in a forked child, where the ring's memory does not exist: an update would write
        to it all the same."""
        if self.is_open:
            self.ring.slots[0].lease.tensor(torch.uint8, (1,))
        elif self._closed:
            self.tier.open()

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Record]:
        """Allocates all of these, or raises."""
        self.reserve(wanted)
        made, self._reserved = self._reserved, []
        self.records.update((id(record), record) for record in made)
        return made

    def reserve(self, wanted: Sequence[Wanted]) -> None:
        """Reserves room for the next `lay_out`, so that a tier that is too small raises before anything is changed."""
        self.open()
        if [record.wanted for record in self._reserved] == list(wanted):
            return
        before, self._reserved = self._reserved, []
        self.tier.evict([record.part for record in before])
        self._reserved = [Record(part, spec) for part, spec in zip(self.tier.lay_out(wanted), wanted, strict=True)]

    def evict(self, records: Iterable[Record]) -> None:
        """Frees the records."""
        for record in list(records) if not self._closed else ():
            self.tier.evict([record.part])
            record.dropped = True
            del self.records[id(record)]

    def held(self) -> dict[str, int]:
        """Returns the bytes of all records, by role."""
        held: Counter[str] = Counter()
        for record in self.records.values():
            held[record.wanted.role] += record.nbytes
        return dict(held)

    def view(self, slot: Slot, record: Record) -> Tensor:
        """Returns the content of a record in a slot."""
        return slot.lease.tensor(record.wanted.dtype, record.wanted.shape)

    def fetch(self, record: Record, out: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to fetch a record into host memory."""
        return self.tier.fetch(record.part, out, after)

    def store(self, record: Record, value: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to store the content of host memory."""
        ticket = self.tier.store(record.part, value, after)
        record.stored = True
        return ticket

    def reading(self, flow: Generator[int, None, None]) -> Generator[int, None, None]:
        """Lends the ring to whoever reads records, until another one does, or they are written."""
        self._stop_reading()
        self._reading = weakref.ref(flow)
        return flow

    def is_lent_to(self, flow: Generator[int, None, None] | None) -> bool:
        """Whether nobody else has had the ring since `reading` lent it."""
        return flow is not None and self._reading is not None and self._reading() is flow

    def _stop_reading(self) -> None:
        flow, self._reading = None if self._reading is None else self._reading(), None
        if flow is not None:
            with DeferredSignals():  # a Ctrl-C would be lost in it
                flow.close()  # which waits for reads that nobody has asked for

    def begin_change(self) -> None:
        """Declares that records are about to be written: what was read ahead of them is discarded."""
        self._stop_reading()
        self.version += 1
