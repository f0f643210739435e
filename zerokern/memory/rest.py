"""Maps memory at a fixed address only while it is used; in between its contents rest in a tier.

Tensors over it are made once, and code that knows them by address goes on knowing them. Without a user the pages are
given back to the system, and touching them is a fault, so that nobody reads stale values. Memory that somebody has a
view of stays mapped until the view is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zerokern.core.errors import ShardError, ZerokernError
from zerokern.memory.addresses import storage_references
from zerokern.memory.arena import PAGE
from zerokern.memory.pages import Pages, reserve
from zerokern.memory.room import check_fits
from zerokern.memory.staging import Ticket
from zerokern.memory.tier import Tier, Wanted

__all__ = ["GOING", "Rest", "Rests"]

GOING = 32 << 20
PATIENCE_S = 10.0  # with an update that is under way beside its user's thread


class Rests:
    """Holds all that rests in one tier.

    `leaving_nbytes`: the most bytes in memory without a user. One half of it, at most `GOING`, may be on its way to the
    tier before a new fetch waits for that; the rest stays in memory for its next user.

    >>> from zerokern.memory import HostTier
    >>> rests = Rests(HostTier("example"))
    >>> one = rests.make("parameters", 8, torch.float32)
    >>> with one.used():
    ...     one.change(); _ = one.memory.fill_(2.0)
    >>> rests.drain(); one.is_here
    False
    >>> with one.used():
    ...     one.memory.sum()
    tensor(16.)
    """

    def __init__(self, tier: Tier[Any], leaving_nbytes: int = 2 * GOING) -> None:
        self.tier, self.leaving_nbytes = tier, leaving_nbytes
        self.pages = Pages()
        self.lock = threading.RLock()
        # both in order, and weakly: a rest keeps these, and not the other way round
        self.leaving: WeakKeyDictionary[Rest, None] = WeakKeyDictionary()  # without a user, given back once stored
        self.kept: WeakKeyDictionary[Rest, None] = WeakKeyDictionary()  # without a user, while somebody has a view
        self.unused: list[Any] = []  # room in the place that nobody has any more
        self._pid, self._closed = os.getpid(), ""
        self._all: weakref.WeakSet[Rest] = weakref.WeakSet()

    def make(self, role: str, numel: int, dtype: torch.dtype) -> Rest:
        """Makes memory for these elements, zeros at first, with room for them in the tier."""
        self.check()
        self.evict()
        return Rest(self, role, numel, dtype)

    def close(self, because: str) -> bool:
        """Ends all fetching: later calls raise `because`, and the tier may go. Returns False if something stays in use.

        An update that runs beside its user's thread ends by itself, and is waited for.
        """
        until = time.monotonic() + PATIENCE_S
        while self._in_use and time.monotonic() < until:
            time.sleep(0.005)
        with self.lock:
            if self._in_use:
                return False
            self._closed = because
            for one in list(self.leaving):
                del self.leaving[one]
                with contextlib.suppress(Exception):  # nobody will read what was to be stored
                    one.end()
            self.pages.drop()
        return True

    @property
    def _in_use(self) -> bool:
        with self.lock:
            return any(one._users for one in list(self._all))

    def evict(self) -> None:
        """Frees the room of owners that are gone."""
        while self.unused:
            self.tier.evict([self.unused.pop()])

    def check(self) -> None:
        """Raises in a forked child, which has none of the memory, and after `close`."""
        if self._closed:
            raise ShardError(self._closed)
        if os.getpid() != self._pid:
            raise ZerokernError(
                f"these tensors rest in {self.tier!r} of process {self._pid}, and this is {os.getpid()}, forked from "
                "it: they are not here. Hand a child copies, or start it with the 'spawn' method"
            )

    def sweep(self, room: int = 0) -> None:
        """Frees memory that is stored, or that nobody has a view of any more.

        What is still being stored may stay, up to a limit less `room`. Raises the error of a store; its memory stays.
        """
        with self.lock:
            kept = list(self.kept)
            self.kept.clear()
            for one in kept:
                one.store_if_unused()
            going = [one for one in list(self.leaving) if not one.is_awaited]
            there = sum(one.nbytes for one in going)
            for one in going:
                if one.is_stored or there + room > self._going_nbytes:
                    there -= one.nbytes
                    del self.leaving[one]
                    one.end()

    def has_room(self, nbytes: int) -> bool:
        """Returns whether nbytes more may stay in memory for their next user."""
        awaited = sum(one.nbytes for one in list(self.leaving) if one.is_awaited)
        return awaited + nbytes <= self.leaving_nbytes - self._going_nbytes

    @property
    def _going_nbytes(self) -> int:
        return min(GOING, self.leaving_nbytes // 2)

    def drain(self) -> None:
        """Waits until all memory without a user is stored and freed."""
        with self.lock:
            for one in list(self.leaving):
                del self.leaving[one]
                one.end()
            self.pages.drop()

    @property
    def nbytes(self) -> int:
        """Bytes in memory without a user."""
        with self.lock:
            return sum(one.nbytes for one in [*self.leaving, *self.kept]) + self.pages.nbytes


class Rest:
    """One range of memory, made by `Rests.make`. The tensor over it, `memory`, has its elements while it is used.

    Users are counted: each `fetch` needs a `leave`.
    """

    def __init__(self, rests: Rests, role: str, numel: int, dtype: torch.dtype) -> None:
        self.rests = rests
        self._users = 0
        rests._all.add(self)
        size = -(-max(1, numel * dtype.itemsize) // PAGE) * PAGE
        (self._kept,) = rests.tier.lay_out([Wanted(role, torch.Size([size]), torch.uint8)])
        weakref.finalize(self, rests.unused.append, self._kept).atexit = False
        mapping, skip = reserve(size)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=skip)
        rests.pages.most_nbytes = max(rests.pages.most_nbytes, 2 * size)  # the one in use, and the next
        self.memory = torch.frombuffer(mapping, dtype=dtype, count=max(1, numel), offset=skip)[:numel]
        # over the same memory, with a storage of its own: views of it are with others
        self._lent = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=skip)
        self._views = sys.maxsize  # of the memory, as few as there ever were: those that are always there
        self._has_contents = False  # in the place
        self._changed = False
        self._watched: list[tuple[Tensor, int]] = []  # who was handed out, and the versions that they had
        self._coming: Ticket | None = None
        self._going: Ticket | None = None
        self._failure: BaseException | None = None
        self.is_awaited = False  # stays for its next user, even once it is stored
        self.is_here = False

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, whole pages."""
        return self._bytes.nbytes

    def fetch(self) -> None:
        """Adds a user, and starts to fetch the contents if they are not in memory; `wait` returns once they are."""
        rests = self.rests
        rests.check()
        with rests.lock:
            if not self.is_here:
                rests.sweep(self.nbytes)
                self._appear()
                try:
                    self._coming = rests.tier.fetch(self._kept, self._bytes) if self._has_contents else None
                except BaseException:
                    self._give_back()
                    raise
                self.is_here = True  # from here on: Ctrl-C may come at any line
            self.is_awaited = False
            self._users += 1

    def wait(self) -> None:
        """Waits until the contents are in memory; a failed fetch raises for every user."""
        coming = self._coming
        if coming is not None:
            try:
                coming.wait()
            except ZerokernError as error:  # no other: that of a signal's handler is no failure of ours
                self._failure = error
            self._coming = None
        if self._failure is not None:
            raise self._failure

    def change(self) -> None:
        """Marks the contents as changed, so that they are stored again; waits until they may be written."""
        with self.rests.lock:
            going, self._going = self._going, None
            self._changed = True
        if going is not None:
            going.wait()

    def watch(self, tensor: Tensor) -> None:
        """Watches the version of a view that is handed out: a write to it counts as a change."""
        if not any(one is tensor for one, _ in self._watched):
            self._watched.append((tensor, tensor._version))

    def lend(self, view: Tensor) -> Tensor:
        """Returns a view, with its version, that may be kept. It has a storage of its own, whose users are counted."""
        shown = view.detach()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(shown):
            shown.set_(self._lent.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        return shown

    def forget(self) -> None:
        """Drops the contents: the next fetch reads nothing, and finds old values or zeros."""
        with self.rests.lock:
            self._has_contents = self._changed = False

    def leave(self, *, awaited: bool = False) -> None:
        """Removes a user. After the last one the memory is freed, once changes are stored.

        `awaited`: somebody else is about to use it, so it stays if there is room.
        """
        with self.rests.lock:
            self._users -= 1
            if not self._users:
                self.is_awaited = awaited and self.rests.has_room(self.nbytes)
                self.store_if_unused()

    @contextlib.contextmanager
    def used(self, *, changed: bool = False) -> Iterator[None]:
        """Context manager within which the contents are in memory. `changed`: they are written within."""
        self.fetch()
        try:
            self.wait()
            if changed:
                self.change()
            yield
        finally:
            self.leave()

    @property
    def is_stored(self) -> bool:
        """Whether nothing of it is being stored."""
        return self._going is None or self._going.done()

    def is_viewed(self) -> bool:
        """Returns whether there are views besides those that always exist, which the first call counts."""
        views = storage_references(self.memory)
        self._views = min(self._views, views)
        return views > self._views or self.is_lent

    @property
    def is_lent(self) -> bool:
        """Whether somebody still has a view from `lend`."""
        return storage_references(self._lent) > _references_of_one_tensor()

    def store_if_unused(self) -> None:
        """Stores, keeps or frees memory that nobody uses. Called with the lock held."""
        if self._users or not self.is_here:
            return
        if self.rests._closed:  # a view that somebody has kept ends: there is no place for what it shows
            self._changed = False
        if self._coming is not None:  # nobody has waited: it must not arrive in memory that is not there
            with contextlib.suppress(Exception):
                self._coming.wait()
            self._coming = None
        if self._failure is None and self.is_viewed():
            self.rests.kept[self] = None
            return
        if any(tensor._version != version for tensor, version in self._watched):
            self._changed = True
        self._watched.clear()
        if self._failure is None and self._changed:
            if self._going is not None:
                self._going.wait()
            self._going = self.rests.tier.store(self._kept, self._bytes)
            self._has_contents = True
            self._changed = False
        if self.is_stored and not self.is_awaited:
            self.end()
        else:
            self.rests.leaving.setdefault(self)

    def end(self) -> None:
        """Waits for the store that is under way, then frees the memory. Called with the lock held."""
        going, self._going = self._going, None
        if going is not None:
            try:
                going.wait()
            except BaseException:
                self._changed = True
                raise
        if not self._users and self.is_here and not self._changed:
            if self._failure is None and self.is_viewed():
                self.rests.kept[self] = None
            else:
                self._give_back()

    def _give_back(self) -> None:
        self.is_here, self.is_awaited, self._failure = False, False, None
        self.rests.pages.take(self._bytes.data_ptr(), self.nbytes)

    def _appear(self) -> None:
        """Maps memory, and zeroes it unless it is about to be read into."""
        try:
            given = self.rests.pages.give(self._bytes.data_ptr(), self.nbytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                check_fits(
                    self.nbytes, "memory for what is fetched", because=f"the system said {os.strerror(error.errno)}"
                )
            raise
        if not self._has_contents:
            ctypes.memset(self._bytes.data_ptr(), 0, given)


@functools.cache
def _references_of_one_tensor() -> int:
    """Returns how many references there are to memory that one tensor alone is over."""
    return storage_references(torch.empty(1))
