"""The place on disk: spans cut into records, which pass through a ring of host memory without a copy.

A record is one key of a Store. Small spans share one, large ones are spread over several (`pieces.py`). What a span's
columns mean is not known here.
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
from zerokern.io.pieces import PAGE, Piece, Width, plan
from zerokern.io.store import Store
from zerokern.io.ticket import Ticket
from zerokern.io.tier import Nvme
from zerokern.memory import Arena, Ring, Slot, flow

__all__ = ["SLOTS", "NvmePlace", "Record"]

SLOTS = 8
# Two columns of 4 MiB side by side take turns on the same banks of memory: 0.61 ns per parameter, 0.56 with slots that
# are no power of two (fp32 Adam).
LARGE, SKEW = 4 << 20, 16 << 10
Span = tuple[int, tuple[Width, ...]]  # elements, and what its columns take


class Record:
    """One piece of what rests on disk."""

    __slots__ = ("dropped", "key", "nbytes", "stored", "unsettled")

    def __init__(self, key: str, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes
        self.stored = False  # the Store has contents for the key
        self.dropped = False
        self.unsettled: set[Any] = set()  # spans to be begun, or put in order, before they are next used


class NvmePlace:
    """Opens its Store and takes its memory when room is first asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = NvmePlace(Nvme(folder, ring_nbytes="1M"), "example", "cargo")
    ...     rows = place.lay_out([(1000, (Width(4, 1),))])
    ...     [(record.nbytes, piece.segments[0].numel) for record, piece in rows]
    [(4096, 1000)]
    """

    def __init__(self, tier: Nvme, owner: str, contents: str) -> None:
        """`owner`: who takes the memory. `contents`: what is kept, as keys and refusals call it."""
        nbytes = tier.ring_nbytes // SLOTS // PAGE * PAGE
        self.slot_nbytes = nbytes - SKEW if nbytes >= LARGE else nbytes
        self.tier, self._owner, self._contents = tier, owner, contents
        self.records: dict[str, Record] = {}
        self.ahead: dict[Record, tuple[Slot, Any]] = {}  # what is read before it is asked for: slots, and tickets
        self.version = 0  # counts what may have changed records
        self._held: list[Record] = []  # room for what is about to be laid out
        self._numbers = itertools.count()

    @property
    def is_open(self) -> bool:
        return hasattr(self, "store")

    def open(self) -> None:
        """Take memory for the ring, then the folder, which is refused where another job has it."""
        if not self.is_open:
            arena = Arena(SLOTS * self.slot_nbytes)
            ring = Ring(arena, SLOTS, self.slot_nbytes, self._owner)
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

    def check(self) -> None:
        """Raises in a forked child: the ring's memory is not there, and an update would write to it all the same."""
        if self.is_open:
            self.ring.slots[0].lease.tensor(torch.uint8, (1,))

    def lay_out(self, spans: Sequence[Span]) -> list[tuple[Record, Piece]]:
        """Room for all of these, or an error."""
        made = self._reserved(spans)
        self.records.update((record.key, record) for record, _ in made)
        return made

    def hold(self, spans: Sequence[Span]) -> None:
        """Take the room for what is to be laid out next: a disk that is too small shows before anything is changed."""
        self._held = [record for record, _ in self._reserved(spans)]

    def _reserved(self, spans: Sequence[Span]) -> list[tuple[Record, Piece]]:
        self.open()
        pieces = plan([numel for numel, _ in spans], [widths for _, widths in spans], self.slot_nbytes)
        held, self._held = self._held, []
        if [record.nbytes for record in held] == [piece.nbytes for piece in pieces]:
            return list(zip(held, pieces, strict=True))
        self._give(held)
        made: list[tuple[Record, Piece]] = []
        try:
            for piece in pieces:
                record = Record(f"{self._contents}/{next(self._numbers):06}", piece.nbytes)
                self.store.reserve(record.key, torch.uint8, (record.nbytes,))
                made.append((record, piece))
        except BaseException as error:
            self._give([record for record, _ in made])
            if isinstance(error, ZerokernError):
                nbytes = sum(piece.nbytes for piece in pieces)
                error.args = (f"{error}\nThe {self._contents} needs {nbytes:,} bytes on disk",)
            raise
        return made

    def drop(self, records: Iterable[Record]) -> None:
        """Give their room back."""
        for record in list(records):
            self._give([record])
            del self.records[record.key]

    def _give(self, records: Iterable[Record]) -> None:
        for record in records:
            self.store.delete(record.key)
            record.dropped = True

    def view(self, slot: Slot, record: Record) -> Tensor:
        """The bytes that a record has in a slot."""
        return slot.lease.tensor(torch.uint8, (record.nbytes,))

    def fetch(self, record: Record, slot: Slot, after: Any = None) -> Ticket | None:
        """A record on its way into a slot; None where it has no contents yet."""
        return self.store.get(record.key, self.view(slot, record), after=after) if record.stored else None

    def put(self, record: Record, slot: Slot) -> Ticket:
        """What the slot holds on its way into the record."""
        return self.store.put(record.key, self.view(slot, record))

    def stop_reading(self) -> None:
        """Nothing is on its way into the ring that nobody has asked for yet."""
        while self.ahead:
            _, ticket = self.ahead.popitem()[1]
            if ticket is not None:
                with contextlib.suppress(ZerokernError):  # nobody has asked for it
                    ticket.wait()

    def begin_change(self) -> None:
        """Records are about to be written: what was read of them ahead is of no more use, nor what will be."""
        self.stop_reading()
        self.version += 1

    def read_through(self, records: Sequence[Record], use: Callable[[Record, Slot], object]) -> None:
        """Each is fetched into the ring, and used there, in order."""
        self.stop_reading()
        flow(
            self.ring,
            len(records),
            lambda i, slot, after: self.fetch(records[i], slot, after),
            lambda i, slot: use(records[i], slot),
            lambda i, slot: None,
        )

    def write_through(self, records: Sequence[Record], fill: Callable[[Record, Slot], object]) -> None:
        """Each is filled in the ring, and stored from there, in order."""
        self.begin_change()
        flow(
            self.ring,
            len(records),
            lambda i, slot, after: None,
            lambda i, slot: fill(records[i], slot),
            lambda i, slot: self.put(records[i], slot),
        )


def _give_back(ring: Ring) -> None:
    """Leases and their arena refer to each other, so that memory would wait for the garbage collector."""
    with contextlib.suppress(ZerokernError):  # in a forked child, whose memory it is not
        arena = ring.arena
        ring.close()
        arena.close()
