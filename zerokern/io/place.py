"""The place on disk: records, which pass through a ring of host memory without a copy; and `Nvme`, which names one.

A record is one key of a Store. What it means is not known here.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError, ZerokernError, got
from zerokern.core.units import RING_NBYTES, parse_nbytes
from zerokern.io.engine import KINDS
from zerokern.io.files import refuse_unusable
from zerokern.io.store import PAGE, Store
from zerokern.io.ticket import Ticket
from zerokern.memory import Arena, Ring, Slot, Wanted, flow

__all__ = ["SLOTS", "Nvme", "NvmePlace", "Record", "below"]

SLOTS = 8
# Two columns of 4 MiB side by side take turns on the same banks of memory: 0.61 ns per parameter, 0.56 with slots that
# are no power of two (fp32 Adam).
LARGE, SKEW = 4 << 20, 16 << 10
LEAST_RING = 1 << 20
_open: weakref.WeakValueDictionary[str, NvmePlace] = weakref.WeakValueDictionary()  # by folder, those of this process
_moments = itertools.count()  # tells which of two things came first


@dataclass(frozen=True)
class Nvme:
    """A folder on disk as a tier: state is kept in files there and streams through host memory when it is needed.

    Each optimizer needs a folder of its own. Several ranks may be given the same `path`; each makes a folder below it.

    Args:
        path: a folder on a fast local disk. It is made when it is first needed; the folder above it must exist.
        budget: bytes of disk, or text such as "8G" (GiB). They are reserved at once; without it files grow.
        ring_nbytes: host memory that the state streams through, as bytes or text.
        engine: "uring", "threads", or "auto" for the better one that this kernel allows.
        checksum: whether each record has a CRC32C, checked when it is read.

    >>> Nvme("swap", budget="8G").budget == 8 * 2**30
    True
    """

    path: str
    budget: int | None = None
    ring_nbytes: int = RING_NBYTES
    engine: str = "auto"
    checksum: bool = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        budget: int | str | None = None,
        ring_nbytes: int | str = RING_NBYTES,
        engine: str = "auto",
        checksum: bool = False,
    ) -> None:
        if engine not in KINDS:
            raise ValueError(got("engine", engine, ", ".join(map(repr, KINDS))))
        ring = parse_nbytes("ring_nbytes", ring_nbytes)
        if ring < LEAST_RING:
            raise ValueError(got("ring_nbytes", ring_nbytes, f"at least {LEAST_RING} bytes"))
        room = None if budget is None else parse_nbytes("budget", budget)
        fields = {"path": os.fspath(path), "budget": room, "ring_nbytes": ring, "engine": engine, "checksum": checksum}
        refuse_unusable(Path(os.path.abspath(path)), room)
        for name, value in fields.items():  # frozen from here on
            object.__setattr__(self, name, value)


def below(tier: Nvme, *names: str) -> Nvme:
    """The same tier in a folder below its own, which need not be there yet.

    >>> below(Nvme("swap"), "state-0").path
    'swap/state-0'
    """
    made = copy.copy(tier)
    object.__setattr__(made, "path", os.path.join(tier.path, *names))
    return made


class Record:
    """What stands for a tensor that rests on disk."""

    __slots__ = ("dropped", "key", "stored", "unsettled", "wanted")

    def __init__(self, key: str, wanted: Wanted) -> None:
        self.key, self.wanted = key, wanted
        self.stored = False  # its contents are on their way to the disk, or there
        self.dropped = False
        self.unsettled: set[Any] = set()  # spans to be begun, or put in order, before they are next used

    @property
    def nbytes(self) -> int:
        return self.wanted.nbytes


class NvmePlace:
    """Opens its Store and takes its memory when room is first asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = NvmePlace(Nvme(folder, ring_nbytes="1M"), "example")
    ...     (record,) = place.lay_out([Wanted("cargo", torch.Size([1000]), torch.float32)])
    ...     place.store(record, torch.ones(1000)).wait()
    ...     place.held()
    {'cargo': 4000}
    """

    def __init__(self, tier: Nvme, owner: str, *, staged: bool = True) -> None:
        """`owner`: who takes the memory. `staged`: records pass through a ring, which is taken with the folder."""
        nbytes = tier.ring_nbytes // SLOTS // PAGE * PAGE
        self.slot_nbytes = nbytes - SKEW if nbytes >= LARGE else nbytes
        self.tier, self._owner, self._staged = tier, owner, staged
        self.records: dict[str, Record] = {}
        self.ahead: dict[Record, tuple[Slot, Any]] = {}  # what is read before it is asked for: slots, and tickets
        self.version = 0  # counts what may have changed records
        self._reserved: list[Record] = []  # room for what is about to be laid out
        self._numbers = itertools.count()
        self._made, self._opened = next(_moments), -1
        self._closed, self._pid = "", os.getpid()  # why nothing can be done with it any more
        #: asked to give the folder up to a place that was made after this one had opened it: says what whoever uses
        #: this one is told from then on, or nothing if it is at work
        self.gives_way: Callable[[], str] | None = None

    @property
    def budget(self) -> int | None:
        """Of the files, which are allocated at once then."""
        return self.tier.budget

    @property
    def is_open(self) -> bool:
        return hasattr(self, "swap") and not self._closed

    def open(self) -> None:
        """Take memory for the ring, then the folder, which is refused where another job has it.

        A place of this process that had opened the folder before this one was made gives it up: a notebook's cell that
        runs again is not locked out by its first run. Of two that were made first and used then, both are wanted.
        """
        self.refuse_if_closed()
        if not self.is_open:
            folder = os.path.realpath(self.tier.path)
            self._replace_earlier(folder)
            ring = None
            if self._staged:
                ring = Ring(Arena(SLOTS * self.slot_nbytes), SLOTS, self.slot_nbytes, self._owner)
            arena, tier = None if ring is None else ring.arena, self.tier
            try:
                self.swap = Store(
                    tier.path, budget=tier.budget, engine=tier.engine, checksum=tier.checksum, arena=arena
                )
            except BaseException:
                if ring is not None:
                    _give_back(ring)
                raise
            if ring is not None:
                self.ring = ring
                self._ring_finalizer = weakref.finalize(self, _give_back, ring)
                self._ring_finalizer.atexit = False
            self._opened = next(_moments)
            _open[folder] = self

    def _replace_earlier(self, folder: str) -> None:
        for _ in range(3):  # what autograd's nodes hold is found one by one
            if folder not in _open:
                return
            gc.collect()  # perhaps nobody refers to it any more
        earlier = _open.get(folder)
        if earlier is None or not earlier.is_open or earlier._pid != os.getpid() or earlier.gives_way is None:
            return
        if earlier._opened > self._made:
            return
        because = earlier.gives_way()
        if because:
            earlier.close(because)
            warnings.warn(
                f"{self.tier.path!r} had the {self._owner} of what was built earlier in this process and is still "
                "referred to, in a notebook perhaps by _ or Out. What is built now has the folder from here on: the "
                "earlier one is closed, and using it raises. To keep both give each a folder of its own; "
                "opt.close() closes an optimizer without this warning",
                stacklevel=2,
            )

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise StateError(self._closed)

    def close(self, because: str) -> None:
        """Gives the folder and the ring's memory back; nothing is kept. From here on whoever uses it is told why."""
        if self._closed:
            return
        opened, self._closed = self.is_open, because
        if opened:
            self.stop_reading()
            try:
                with contextlib.suppress(ZerokernError):  # of a transfer whose bytes nobody wants any more
                    self.swap.close()
            finally:
                if self._staged:
                    self._ring_finalizer()

    def check(self) -> None:
        """Raises in a forked child: the ring's memory is not there, and an update would write to it all the same."""
        self.refuse_if_closed()
        if self.is_open and self._staged:
            self.ring.slots[0].lease.tensor(torch.uint8, (1,))

    def lay_out(self, wanted: Sequence[Wanted]) -> list[Record]:
        """Room for all of these, or an error."""
        self.reserve(wanted)
        made, self._reserved = self._reserved, []
        self.records.update((record.key, record) for record in made)
        return made

    def reserve(self, wanted: Sequence[Wanted]) -> None:
        """Take the room for what is to be laid out next: a disk that is too small shows before anything is changed."""
        self.open()
        if [record.wanted for record in self._reserved] == list(wanted):
            return
        self._give_reserved_back()
        try:
            for one in wanted:
                record = Record(f"{one.role}/{next(self._numbers):06}", one)
                self.swap.reserve(record.key, one.dtype, one.shape)
                self._reserved.append(record)
        except BaseException as error:
            self._give_reserved_back()
            if isinstance(error, ZerokernError):
                roles, nbytes = (
                    " and ".join(dict.fromkeys(one.role for one in wanted)),
                    sum(one.nbytes for one in wanted),
                )
                error.args = (f"{error}\nThe {roles} needs {nbytes:,} bytes on disk",)
            raise

    def _give_reserved_back(self) -> None:
        while self._reserved:
            self.swap.delete(self._reserved[-1].key)
            self._reserved.pop()

    def evict(self, kept: Iterable[Record]) -> None:
        """Give their room back."""
        for record in list(kept) if not self._closed else ():
            self.swap.delete(record.key)
            record.dropped = True
            del self.records[record.key]

    def __repr__(self) -> str:
        return f"the folder {self.tier.path!r}"

    def held(self) -> dict[str, int]:
        """Bytes of all records, by role."""
        held: Counter[str] = Counter()
        for record in self.records.values():
            held[record.wanted.role] += record.nbytes
        return dict(held)

    def view(self, slot: Slot, record: Record) -> Tensor:
        """What a record has in a slot."""
        return slot.lease.tensor(record.wanted.dtype, record.wanted.shape)

    def fetch(self, kept: Record, out: Tensor, after: Any = None) -> Ticket:
        """A record on its way into host memory."""
        self.refuse_if_closed()
        return self.swap.get(kept.key, out, after=after)

    def store(self, kept: Record, value: Tensor, after: Any = None) -> Ticket:
        """What host memory holds on its way into the record."""
        self.refuse_if_closed()
        ticket = self.swap.put(kept.key, value, after)
        kept.stored = True
        return ticket

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
            lambda i, slot, after: self.fetch(records[i], self.view(slot, records[i]), after),
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
            lambda i, slot: self.store(records[i], self.view(slot, records[i])),
        )


def _give_back(ring: Ring) -> None:
    """Leases and their arena refer to each other, so that memory would wait for the garbage collector."""
    with contextlib.suppress(ZerokernError):  # in a forked child, whose memory it is not
        arena = ring.arena
        ring.close()
        arena.close()
