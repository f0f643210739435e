"""`Store`: tensors by key on a disk. Every request has a ticket, and every ticket an end that somebody is told of."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from zerokern.core import native
from zerokern.core.errors import IoError, KernelError, got
from zerokern.core.units import parse_nbytes
from zerokern.io import index
from zerokern.io.advice import file_error, refusing
from zerokern.io.engine import Engine, Faults, check_settings
from zerokern.io.files import Files, make_folder, remains
from zerokern.io.index import Entry, mismatch, span_of
from zerokern.io.lock import FolderLock, let_go_in_child
from zerokern.io.probing import settings
from zerokern.io.space import Extent, Space
from zerokern.io.ticket import Ticket, Transfers, again
from zerokern.memory.room import amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerokern.memory import Arena

__all__ = ["Store"]

DONE, READ, WRITE, PADDED = native.IO_DONE, native.IO_READ, native.IO_WRITE, native.IO_PADDED
PAGE = 4096
MOST_SHOWN = 8

_log = logging.getLogger("zerokern.io")


class Store:
    """Tensors by key in a folder that belongs to this store alone; the files are removed when it is closed.

    ``budget``: bytes, or text as ``"8G"``, allocated at once; none: files grow. ``engine``: ``"uring"``, ``"threads"``
    or ``"auto"``. ``depth`` blocks of ``block`` bytes are in flight; what is not given comes from a probe of the disk,
    once. ``checksum``: CRC32C of each tensor, checked when a get is waited for. ``durable``: files are kept, and a kill
    at any moment leaves the state of the last ``sync()``; a key that is put again takes its room twice until then.
    Spans of ``arena`` move without a copy, any other tensor with one, which ``stats()`` counts.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder, zk.io.Store(folder, depth=8, block=1 << 20) as store:
    ...     written = store.put("layer.0", torch.arange(6.0))
    ...     out = torch.empty(6)
    ...     store.get("layer.0", out).wait()   # ordered behind the put
    ...     out.tolist(), "layer.0" in store
    ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        budget: int | str | None = None,
        engine: str = "auto",
        depth: int | None = None,
        block: int | None = None,
        checksum: bool = False,
        durable: bool = False,
        arena: Arena | None = None,
        faults: Faults | None = None,
    ) -> None:
        check_settings(engine, 1 if depth is None else depth, PAGE if block is None else block)
        self.folder = Path(os.path.abspath(folder))
        self.checksum, self.durable, self.arena = checksum, durable, arena
        self._resources = resources = Resources(
            self.folder,
            durable=durable,
            budget=None if budget is None else parse_nbytes("budget", budget),
            engine=engine,
            depth=depth,
            block=block,
            faults=faults,
            arena=arena,
        )
        self._transfers, self._slots = resources.transfers, resources.transfers.requests
        self._files, self._space = resources.files, resources.space
        self._entries: dict[str, Entry] = {}
        self._replaced: list[Entry] = []  # on the disk until an index without them is published
        for entry in resources.entries:
            self._entries[entry.key], entry.published = entry, True
            entry.put = Ticket(self._transfers, None, WRITE, entry.key, entry.nbytes, 0, 0)
            if entry.lost:
                entry.put._failure = IoError(entry.lost, path=str(self.folder), errno=errno.ENODATA, key=entry.key)
        self._finalizer = weakref.finalize(self, resources.abandon)

    def put(self, key: str, tensor: torch.Tensor, after: Ticket | None = None) -> Ticket:
        """Writes a tensor, whose memory must not change until the ticket has ended.

        What the key held is gone once this returns. ``after``: a ticket of this store that must have ended first.
        """
        address, nbytes = span_of("tensor", tensor)
        if after is not None:
            self._check_after(after)
        crc = native.crc32c(address, nbytes) if self.checksum else None
        with self._transfers.lock:
            entry = self._entries.get(key)
            self._resources.check()
            before = self._before(entry, after)  # it may wait, and be interrupted: nothing has changed yet
            if entry is None or entry.nbytes != nbytes or entry.published:
                entry = self._place(key, entry, nbytes, tensor.dtype, tensor.shape)
            self._resources.unpublished = True
            return self._start(WRITE, entry, address, nbytes, tensor, before, crc)

    def get(self, key: str, out: torch.Tensor, after: Ticket | None = None) -> Ticket:
        """Reads a tensor into ``out`` of its dtype and shape, which is undefined until the ticket has ended."""
        address, nbytes = span_of("out", out)
        if after is not None:
            self._check_after(after)
        with self._transfers.lock:
            self._resources.check()
            entry = self._known(key)
            put = entry.put
            if put is None:
                raise KeyError(f"key {key!r} was reserved and never put: there is nothing to read yet")
            if out.dtype is not entry.dtype or out.shape != entry.shape:
                raise mismatch(entry, out)
            slot = put._slot
            if slot is not None and slot.words[slot.state] == DONE:
                self._transfers.settle(put)
                slot = None
            if put._failure is not None:
                says = (
                    f"get of {key!r} is not possible: its last put failed. Put it again. That put said: {put._failure}"
                )
                raise again(says, put._failure)
            source = None if slot is None else put
            crc = entry.crc if self.checksum else None
            ticket = self._start(READ, entry, address, nbytes, out, self._before(entry, after), crc, source)
            increment_version(out)
            return ticket

    def _start(
        self,
        op: int,
        entry: Entry,
        address: int,
        nbytes: int,
        tensor: torch.Tensor,
        before: int,
        crc: int | None,
        source: Ticket | None = None,
    ) -> Ticket:
        """Queues one transfer behind the request at `before`.

        `crc`: of the bytes that are written, or that a read must find. `source`: the put that a read waits for.
        """
        extent = entry.extent
        if extent is None:
            ticket = Ticket(self._transfers, None, op, entry.key, 0, 0, 0)
            if op == WRITE:
                entry.put, entry.dtype, entry.shape, entry.crc = ticket, tensor.dtype, tensor.shape, crc
            return ticket
        flags = PADDED if nbytes % PAGE and self.arena is not None and self._owns_padding(address, nbytes) else 0
        slot = self._slots.take()
        file = self._files.all[extent.file].number
        ticket = Ticket(self._transfers, slot, op, entry.key, nbytes, file, extent.offset)
        ticket._tensor = tensor
        if op == READ:  # before it starts: a transfer that ends at once may be settled within that call
            ticket._crc, ticket._source = crc, source
        was = entry.last, entry.put, entry.dtype, entry.shape, entry.crc
        entry.last = ticket
        if op == WRITE:
            entry.put, entry.dtype, entry.shape, entry.crc = ticket, tensor.dtype, tensor.shape, crc
        try:
            self._transfers.start(ticket, slot, address, flags, before)
        except KernelError:  # refused: the key holds what it held
            entry.last, entry.put, entry.dtype, entry.shape, entry.crc = was
            raise
        return ticket

    def _known(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise KeyError(
                f"key {key!r} was asked for; it is none of the {len(self._entries)} keys of {self.folder}. "
                "keys() lists them"
            )
        return entry

    def _check_after(self, after: Ticket) -> None:
        if not isinstance(after, Ticket):
            raise TypeError(got("after", type(after).__name__, "a ticket of this store, or None"))
        if after._transfers is not self._transfers:
            raise ValueError("after= is a ticket of another store; allowed: tickets of this one. Wait for it first")

    def _before(self, entry: Entry | None, after: Ticket | None) -> int:
        """Returns the request that comes first: the last of the key, or `after`. The engine knows one; of two, one is
        awaited."""
        pending = self._transfers.pending_slot
        last = None if entry is None else entry.last
        own = None if last is None else pending(last)
        other = None if after is None else pending(after)
        if own is not None and other is not None and last is not None and last is not after:
            self._transfers.await_ticket(last)
        first = other or own
        return 0 if first is None else first.address

    def _owns_padding(self, address: int, nbytes: int) -> bool:
        """Returns whether what lies behind the span, up to the disk's alignment, is the unused end of its lease."""
        lease = self.arena.find(address, nbytes) if self.arena is not None else None
        return lease is not None and lease.ptr + lease.nbytes == address + nbytes and self._files.offset_align <= PAGE

    def _place(self, key: str, entry: Entry | None, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Entry:
        """Returns an entry whose extent may be written to, in place of the one there is."""
        if not isinstance(key, str):
            raise TypeError(got("key", key, "a string"))
        old = None if entry is None or entry.published else entry.extent
        if entry is not None and old is not None and self._space.extents.capacity(nbytes) == old.nbytes:
            entry.nbytes = nbytes
            return entry
        try:
            extent = self._space.take(nbytes, self._table) if nbytes else None
        except IoError as error:
            error.key = key
            raise
        if entry is not None:
            self._leave(entry)
        made = self._entries[key] = Entry(key, extent, nbytes, dtype, shape)
        return made

    def _leave(self, entry: Entry) -> None:
        """Frees an extent: at once, or when no published index names it any more."""
        if entry.extent is None:
            return
        if entry.published:
            self._replaced.append(entry)
        else:
            self._space.give(entry.extent, entry.last)

    def _table(self) -> str:
        """Returns a table of the largest keys."""
        held = sorted(self._entries.values(), key=lambda one: -one.nbytes)
        rows = [f"  {one.key[:40]:<40}{amount(one.nbytes):>12}" for one in held[:MOST_SHOWN]]
        rest = sum(one.nbytes for one in held[MOST_SHOWN:])
        more = [f"  {f'{len(held) - MOST_SHOWN} more keys':<40}{amount(rest):>12}"] if held[MOST_SHOWN:] else []
        return "\n".join([*rows, *more]) or "  no key yet"

    def reserve(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Takes the room for a tensor that is put later, so that a full disk shows now. A get raises until then."""
        with self._transfers.lock:
            self._resources.check()
            if key in self._entries:
                raise ValueError(got("key", key, "keys that are not there yet", "Delete it first"))
            size = torch.Size(shape)
            if min(size, default=0) < 0:
                raise ValueError(got("shape", tuple(shape), "lengths from 0 on"))
            self._place(key, None, size.numel() * dtype.itemsize, dtype, size)

    def delete(self, key: str) -> None:
        """Forgets a key; its room is used again when the last transfer in it has ended."""
        with self._transfers.lock:
            self._resources.check()
            entry = self._known(key)
            del self._entries[key]
            self._resources.unpublished = True
            self._leave(entry)

    def keys(self) -> list[str]:
        """Lists the keys that were put, in order of their first put."""
        with self._transfers.lock:
            return [key for key, entry in self._entries.items() if entry.put is not None]

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(key)  # type: ignore[call-overload]
        return entry is not None and entry.put is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were put or reserved; what they take on the disk is ``stats()["taken_nbytes"]``."""
        with self._transfers.lock:
            return sum(entry.nbytes for entry in self._entries.values())

    @property
    def engine(self) -> str:
        """The engine that runs: ``"uring"`` or ``"threads"``."""
        return self._resources.engine.kind

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._files.direct

    def stats(self) -> dict[str, object]:
        """Returns which engine runs, what is held, and what the engine has done since it was opened."""
        with self._transfers.lock:
            self._resources.check()
            engine, extents = self._resources.engine, self._space.extents
            return {
                "engine": engine.kind,
                "why": engine.why,
                "direct": self._files.direct,
                "depth": engine.depth,
                "block": engine.block,
                "keys": len(self._entries),
                "file_nbytes": extents.nbytes,
                "taken_nbytes": extents.nbytes - extents.free_nbytes,
                **engine.stats(),
            }

    def sync(self) -> None:
        """Waits until everything has ended; raises failures that no ``wait()`` has told.

        After a kill a durable store is as this leaves it; where this raises, as the last one left it.
        """
        with self._transfers.lock:
            self._resources.check()
            self._transfers.drain()
            if self.durable and not any(ticket.op == WRITE for ticket in self._transfers.untold):
                self._publish()  # a get that failed takes nothing from what was put
            self._transfers.raise_untold()

    def _publish(self) -> None:
        kept = [one for one in self._entries.values() if one.put is not None]
        for one in kept:
            failure = one.put._failure if one.put is not None else None
            if failure is not None and not one.published:
                raise again(
                    f"sync is not possible: the last put of {one.key!r} failed. Put it again or delete it. "
                    f"That put said: {failure}",
                    failure,
                )
        if not self._resources.unpublished:
            return
        for one in kept:  # from the rename on the index names these extents, also where what follows it fails
            one.published = True
        self._resources.publish(kept)
        replaced, self._replaced = self._replaced, []
        for entry in replaced:
            if entry.extent is not None:
                self._space.give(entry.extent, None)

    def close(self) -> None:
        """Does ``sync()``, then unlocks the folder; without ``durable`` its files are removed. Twice is no error."""
        if not self._resources.open:
            return
        try:
            self.sync()
        finally:
            self._finalizer.detach()
            self._resources.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an exception a durable store is not published: half of a change is no state."""
        if kind is None:
            self.close()
        elif self._resources.open:
            self._finalizer.detach()
            self._resources.close()

    def __repr__(self) -> str:
        state = f"{self.engine}, {len(self._entries)} keys" if self._resources.open else "closed"
        return f"Store({str(self.folder)!r}, {state})"


class Resources:
    """A store's lock, engine, files and transfers, opened in order and closed in reverse. They are apart from the store
    so that its finalizer may hold them."""

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool,
        budget: int | None,
        engine: str,
        depth: int | None,
        block: int | None,
        faults: Faults | None,
        arena: Arena | None,
    ) -> None:
        self.folder, self.durable = folder, durable
        self.open, self.unpublished = False, False
        self._sync_failure: IoError | None = None
        self.pid = os.getpid()
        self._registered: Arena | None = None
        self._lock_number = -1
        with refusing(folder, "A store"):
            make_folder(folder, 0o700)
            self.lock = FolderLock(folder)
            try:
                self.entries = self._published()
                self._clear(keep=self._names)
                depth, block = settings(folder, depth, block)
                self.engine = Engine(engine, depth=depth, block=block, faults=faults)
            except BaseException:
                self.lock.release()
                raise
            self.files = Files(folder, self.engine, place=self.lock.folder_fd, named=durable)
            try:
                # The kernel lets go of a killed ring's files when its last transfer has ended. With the lock among them
                # no other process takes the folder while a write may still land in it.
                self._lock_number = self.engine.file(self.lock.fd, 1, 1)
                self._reopen()
                self.space = Space(self.files, budget, self._extents)
                self.transfers = Transfers(self.engine, self.files.paths)
                if arena is not None:
                    # The ring goes on moving these very pages, which an arena that is closed meanwhile must not free.
                    self._pages = arena.view_at(arena.base, torch.uint8, arena.nbytes)
                    if self.engine.register(arena):
                        self._registered = arena
            except BaseException:
                self._let_go_of_files()
                raise
        self.open = True
        let_go_in_child(self)

    @property
    def _extents(self) -> list[Extent]:
        return [entry.extent for entry in self.entries if entry.extent is not None]

    def _published(self) -> list[Entry]:
        """Returns the entries of a durable store that was here before."""
        found = index.read(self.folder)
        if found is not None and not self.durable:
            raise file_error(
                self.folder,
                f"holds a durable store with {len(found[1])} keys; durable=False would remove it. "
                "Open it with durable=True, choose another folder, or remove its files yourself",
                errno.EEXIST,
            )
        self._names = found[0] if found else []
        return found[1] if found else []

    def _clear(self, keep: list[str]) -> None:
        """Removes what a killed owner left behind."""
        left = [path for path in remains(self.folder) if path.name not in keep]
        for path in left:
            path.unlink(missing_ok=True)
        if left:
            _log.info("%s: %d files of a store that ended without close() are removed", self.folder, len(left))

    def _reopen(self) -> None:
        for name in self._names:
            try:
                self.files.reopen(name)
            except FileNotFoundError:
                says = (
                    f"is named by {index.NAME} and is not there; restore it, or remove the folder's files to begin anew"
                )
                raise file_error(self.folder / name, says, errno.ENOENT) from None
        # A longer file would read as zeros where bytes are missing: what is lost is written down before any is made so.
        for entry in self.entries:
            self._check_length(entry)
        if any(entry.lost for entry in self.entries):
            self.publish(self.entries)
        for extent in self._extents:
            file, end = self.files.all[extent.file], extent.offset + extent.nbytes
            if file.nbytes < end:
                self.files.lengthen(file, end)

    def _check_length(self, entry: Entry) -> None:
        """Marks an entry as lost if its file ends before its bytes do."""
        if entry.extent is None:
            return
        file, offset = self.files.all[entry.extent.file], entry.extent.offset
        if offset + entry.nbytes > file.nbytes:
            entry.extent = None
            entry.lost = (
                f"{file.path} had {file.nbytes} bytes when it was opened, {entry.key!r} lies at offset {offset}, "
                f"{entry.nbytes} bytes: something has truncated the file"
            )

    def publish(self, entries: list[Entry]) -> None:
        """Makes these entries the state that a reopened store begins with."""
        if self._sync_failure is not None:
            raise again(
                f"{self._sync_failure}. It is unknown since then what the disk holds; another fsync would not tell. "
                "Close the store; what the last sync() published is kept",
                self._sync_failure,
            )
        try:
            self.files.sync()
        except IoError as error:
            self._sync_failure = error
            raise
        # From the rename on the index names these files, also where what follows it fails.
        self._names = [file.path.name for file in self.files.all]
        with refusing(self.folder, "Publishing the index"):
            index.publish(self.folder, self._names, entries)
        self.unpublished = False

    def close(self) -> None:
        """Waits for all transfers, then removes the files that nobody wants to keep, and unlocks the folder."""
        if not self.open:
            return
        self.open = False
        try:
            with self.transfers.lock:
                self.transfers.drain()
        finally:
            self._let_go_of_files()

    def _let_go_of_files(self) -> None:
        try:
            self.files.close(keep=self._names)
            if self._registered is not None:
                self.engine.forget(self._registered)
            if self._lock_number >= 0:
                self.engine.forget_file(self._lock_number)
        finally:
            self.engine.close()
            self.lock.release()

    def abandon(self) -> None:
        """Closes a store that nobody has closed, and logs what nobody was told."""
        if not self.open:
            return
        if self.durable and self.unpublished:
            _log.warning("%s: not closed; what was put since the last sync() is not kept", self.folder)
        self.close()
        for ticket in self.transfers.untold:
            _log.error("%s: not closed, and nobody was told: %s", self.folder, ticket._failure)

    def let_go(self) -> None:
        """Forgets all of it in a forked child: it stays the parent's."""
        if self.open:
            self.open = False
            self.transfers.let_go()
            self.engine.close()
            self.files.close(keep=None)

    def check(self) -> None:
        """Raises IoError if the store is closed, or belongs to another process."""
        if self.open:
            return
        says = "is closed; open another store"
        if os.getpid() != self.pid:
            says = (
                f"belongs to process {self.pid}, from which this one was forked; only that one may use it. "
                "Open a store of another folder in this process"
            )
        raise IoError(f"the store of {self.folder} {says}", path=str(self.folder), errno=errno.EBADF)
