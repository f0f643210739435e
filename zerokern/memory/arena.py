"""A private memory mapping for staging state, and leases of it: huge pages, locked, not shared with forked children.

Disks and GPUs write to this memory by physical address. So its pages are touched before use, it is not inherited by
forked children (after a fork, a write would move the parent to another page, away from a running transfer), and it is
unmapped only when nothing refers to it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import EINVAL, errorcode
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zerokern.core import env, native
from zerokern.core.errors import BudgetError, ZerokernError, got, say_once, whole_number
from zerokern.kernels.triton.backend import beside_captures
from zerokern.memory import placement
from zerokern.memory.layout import PAGE, FreeSpans
from zerokern.memory.room import amount, check_fits
from zerokern.memory.runtime import clear_cuda_error, with_a_context

__all__ = ["PAGE", "Arena", "Lease"]

HUGE_PAGE = 2 << 20
POISON = 0xFF  # NaN in every floating format, -1 in integers
_STEP = 64 << 20  # bytes touched by one system call: Ctrl-C is heard in between, and threads take turns
_TOUCHING = 16  # threads that touch pages at most: more wait for each other
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_LIBC = ctypes.CDLL(None, use_errno=True)
_LATER = threading.local()  # of the thread within `resident_later`: what touches its memory
_CUDA_FLAGS = 1 | 2  # cudaHostRegisterPortable, for every device of the process, and Mapped, for kernels to reach it


@dataclass(eq=False)
class Lease:
    """A lease of an arena: exactly ``nbytes`` at ``ptr``. The owner releases it once nothing moves there.

    A lease that is dropped without release() keeps its bytes allocated: something may still move there.

    >>> arena = Arena(1 << 20)
    >>> with arena.lease(100, "example") as lease:
    ...     lease.tensor(torch.float32, (5, 5)).fill_(2.0).sum()
    tensor(50.)
    >>> arena.close()
    """

    ptr: int
    nbytes: int
    owner: str
    arena: Arena = field(repr=False)
    align: int = PAGE
    released: bool = field(default=False, repr=False)

    def tensor(self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] | None = None, offset: int = 0) -> Tensor:
        """Returns a view of the bytes from ``offset`` on; without a shape, of all. It keeps the memory alive, not the
        lease."""
        if self.released:
            raise ZerokernError(f"the lease of {self.owner!r} was released: its memory may belong to another owner now")
        width = dtype.itemsize
        rest = self.nbytes - offset
        if offset < 0 or rest < 0 or offset % width:
            raise ValueError(got("offset", offset, f"multiples of {width} ({dtype}) from 0 to {self.nbytes}"))
        if shape is None:
            if rest % width:
                raise ValueError(
                    got("dtype", dtype, f"one whose elements fill {rest} bytes", "Pass the shape that is meant")
                )
            shape = (rest // width,)
        numel = math.prod(shape)
        if numel * width > rest or min(shape, default=0) < 0:
            raise ValueError(
                got("shape", tuple(shape), f"shapes of at most {rest // width} elements of {dtype}, as the lease has")
            )
        if numel == 0:  # which torch.frombuffer refuses
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return self.arena.view_at(self.ptr + offset, dtype, numel).view(tuple(shape))

    def release(self) -> None:
        """Gives the bytes back to the arena. Raises if they were released before."""
        self.arena._reclaim(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class Arena:
    """A mapping of ``nbytes`` (rounded up to 4096), resident from the start, that leases are taken from.

    Without ``poison``, ZEROKERN_POISON decides whether leases are filled with 0xFF when they begin and end. A lease
    that does not fit raises BudgetError with a table of who holds what.

    >>> arena = Arena(1 << 20)
    >>> one, two = arena.lease(5000, "exp_avg"), arena.lease(100, "scales")
    >>> one.nbytes, two.ptr - one.ptr, arena.free_nbytes
    (5000, 8192, 1036288)
    >>> arena.find(one.ptr + 1000, 4000).owner
    'exp_avg'
    >>> one.release(); two.release(); arena.close()
    """

    def __init__(self, nbytes: int, *, poison: bool | None = None) -> None:
        self.nbytes = _round_up(whole_number("nbytes", nbytes))
        self.poison = env.switched_on("ZEROKERN_POISON") if poison is None else poison
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._mapping: _Mapping | None = _map(self.nbytes + HUGE_PAGE, self.nbytes)
        start = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._skip = -start % HUGE_PAGE
        self.base = start + self._skip
        os.register_at_fork(after_in_child=functools.partial(never_unmap, weakref.ref(self._mapping)))
        self.nodes = placement.bind(self.base, self.nbytes)
        self.locked = False
        if not touch_later(self._mapping, self._skip, self.nbytes, self._lock_memory):
            _make_resident(self._mapping, self._skip, self.nbytes)
            self._lock_memory()
        self._offered_to_cuda = False
        self._free = FreeSpans(self.nbytes)
        self._taken: dict[int, _Taken] = {}  # by address
        self._ptrs: list[int] = []  # of the live leases, in order

    def _lock_memory(self) -> None:
        refused = native.library().zk_memory_lock(self.base, self.nbytes)
        self.locked = not refused
        if refused:
            say_once(
                "zerokern.memory",
                f"arena memory is not locked (mlock: {_name(refused)}; see ulimit -l): the system may swap it out",
            )

    @property
    def pinned(self) -> bool:
        """Whether CUDA knows the memory; it is told when a lease is taken while CUDA is in use."""
        return self._mapping is not None and self._mapping.registered_at != 0

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not leased, in however many spans."""
        return self._free.total

    def lease(self, nbytes: int, owner: str) -> Lease:
        """Returns a lease of nbytes at a multiple of 4096; the bytes up to the next multiple belong to it too."""
        self.check()
        whole_number("nbytes", nbytes)
        with self._lock:
            if not self._offered_to_cuda and torch.cuda.is_initialized():
                self._register_with_cuda()
            offset = self._free.take(_round_up(nbytes))
            if offset is None:
                raise BudgetError(
                    f"a lease of {nbytes:,} bytes for {owner!r} does not fit into the arena of {amount(self.nbytes)}; "
                    f"the longest free span has {self._free.largest:,} bytes.\n{self._table()}"
                )
            lease = Lease(self.base + offset, nbytes, owner, self)
            self._taken[lease.ptr] = _Taken(nbytes, owner, weakref.ref(lease))
            insort(self._ptrs, lease.ptr)
        self._fill(lease)
        return lease

    def find(self, ptr: int, nbytes: int) -> Lease | None:
        """Returns the live lease that contains [ptr, ptr + nbytes); None if none does."""
        with self._lock:
            i = bisect_right(self._ptrs, ptr)
            lease = self._taken[self._ptrs[i - 1]].lease() if i else None
        return lease if lease is not None and ptr + nbytes <= lease.ptr + lease.nbytes else None

    def table(self) -> str:
        """Returns a table of the bytes that each owner holds, the largest first."""
        self.check()
        with self._lock:
            return self._table()

    def close(self, force: bool = False) -> None:
        """Frees the memory once the last tensor in it is gone. Raises if leases are not released, unless forced."""
        if self._mapping is None:
            return
        self.check()
        with self._lock:
            if self._taken and not force:
                raise ZerokernError(
                    f"the arena cannot close: {len(self._taken)} leases are out; release them, or pass force=True "
                    f"if nothing moves there any more.\n{self._table()}"
                )
            for lease in [taken.lease() for taken in self._taken.values()]:
                if lease is not None:
                    lease.released = True
            self._taken.clear()
            self._ptrs.clear()
            self._mapping.unregister()
            # Only the reference: torch.frombuffer keeps the mapping, but no buffer of it, so that mapping.close() would
            # unmap below tensors that are still there.
            self._mapping = None

    def _table(self) -> str:
        held: dict[str, list[int]] = {}
        for taken in self._taken.values():
            held.setdefault(taken.owner, []).append(taken.nbytes)
        rows = sorted(((owner, len(sizes), sum(sizes)) for owner, sizes in held.items()), key=lambda row: -row[2])
        width = max([len("owner"), len("free"), *(len(row[0]) for row in rows)])
        lines = [f"{'owner':<{width}}{'leases':>9}{'bytes':>18}"]
        lines += [f"{owner:<{width}}{count:>9,}{nbytes:>18,}" for owner, count, nbytes in rows]
        return "\n".join([*lines, f"{'free':<{width}}{'':>9}{self._free.total:>18,}"])

    def view_at(self, ptr: int, dtype: torch.dtype, numel: int) -> Tensor:
        self.check()
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=ptr - self.base + self._skip)

    def _reclaim(self, lease: Lease) -> None:
        self.check()
        with self._lock:
            if lease.released:
                raise ZerokernError(f"the lease of {lease.owner!r} was released already: two owners believe it theirs")
            lease.released = True
            self._fill(lease)  # before anyone else can lease it
            del self._taken[lease.ptr]
            del self._ptrs[bisect_right(self._ptrs, lease.ptr) - 1]
            self._free.give(lease.ptr - self.base, _round_up(lease.nbytes))

    def _fill(self, lease: Lease) -> None:
        if self.poison:
            ctypes.memset(lease.ptr, POISON, _round_up(lease.nbytes))

    def check(self) -> None:
        """Raises if the memory is not there: after the arena was closed, and in a forked child."""
        if os.getpid() != self._pid:
            raise ZerokernError(
                f"this arena belongs to process {self._pid}, and this is {os.getpid()}, forked from it: the memory is "
                "not here (MADV_DONTFORK). Make an arena in the child, or start children with the 'spawn' method"
            )
        if self._mapping is None:
            raise ZerokernError("the arena is closed; make another one")

    def _register_with_cuda(self) -> None:
        """Pins the arena for copies to and from GPUs, once CUDA is in use: an arena alone creates no context."""
        with with_a_context(), beside_captures():  # it breaks off captures of other threads, as cudaHostAlloc does
            refused = torch.cuda.cudart().cudaHostRegister(self.base, self.nbytes, _CUDA_FLAGS)
        self._offered_to_cuda = True  # set last, so that an interrupted attempt is repeated
        if int(refused):
            clear_cuda_error()  # else torch would find it and blame its next call
            say_once(
                "zerokern.memory",
                f"arena memory is not registered with CUDA ({refused}): copies to and from GPUs take a detour",
            )
        else:
            assert self._mapping is not None
            self._mapping.registered_at = self.base


class _Taken(NamedTuple):
    """An arena's record of a lease. It must not keep the lease alive, which keeps the arena: a reference cycle would
    wait for the garbage collector, which training loops switch off (torchtitan does)."""

    nbytes: int
    owner: str
    lease: weakref.ref[Lease]


class _Mapping(mmap.mmap):
    """A mapping that is unregistered from CUDA before it is unmapped: tensors in it may outlive their arena."""

    registered_at = pid = 0

    def unregister(self) -> None:
        if self.registered_at and os.getpid() == self.pid:
            with with_a_context(), beside_captures():
                torch.cuda.cudart().cudaHostUnregister(self.registered_at)
                self.registered_at = 0  # last, so that an interrupted attempt is repeated

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unregister()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _map(nbytes: int, usable: int) -> _Mapping:
    check_fits(usable, "an arena")
    try:
        mapping = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        check_fits(usable, "an arena", because=f"mmap said {error.strerror}")
        raise
    mapping.pid = os.getpid()
    return mapping


@contextlib.contextmanager
def resident_later() -> Iterator[None]:
    """Context manager: what this thread allocates becomes resident beside what it does, and is when it ends.

    A disk fills new memory at its own speed then, instead of waiting until the system has cleared all of it. Whoever
    writes first brings in pages by himself; so what is allocated last, which the disk should fill first, is touched
    first. Raises BudgetError at the end if there was no memory.

    >>> with resident_later():
    ...     arena = Arena(64 << 20)
    ...     _ = arena.lease(100, "example").tensor().fill_(1)
    >>> arena.nbytes
    67108864
    """
    if getattr(_LATER, "touching", None) is not None:
        yield
        return
    try:
        with ThreadPoolExecutor(max(1, min(env.usable_cpus() - 1, _TOUCHING))) as pool:  # one goes on meanwhile
            touching = _LATER.touching = _TouchLater(pool)
            yield
    finally:
        _LATER.touching = None
    for one in touching.touched:
        one.result()


class _TouchLater:
    """Touches pieces of several mappings, those of the last one first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._lock = pool, threading.Lock()
        self._waiting: list[tuple[list[_Piece], Callable[[_Piece], None]]] = []
        self.touched: list[Future[None]] = []

    def add(self, pieces: list[_Piece], touch: Callable[[_Piece], None], then: Callable[[], object] | None) -> None:
        """Has pieces touched in order; then calls `then`."""
        left = len(pieces)

        def touch_one(piece: _Piece) -> None:
            nonlocal left
            touch(piece)
            with self._lock:
                left -= 1
                is_last = left == 0  # of two that end at once, one is
            if is_last and then is not None:
                then()

        with self._lock:
            self._waiting.append((pieces[::-1], touch_one))
        self.touched += [self._pool.submit(self._touch_next) for _ in pieces]

    def _touch_next(self) -> None:
        with self._lock:
            pieces, touch = self._waiting[-1]
            piece = pieces.pop()
            if not pieces:
                self._waiting.pop()
        touch(piece)


def touch_later(mapping: mmap.mmap, begin: int, nbytes: int, then: Callable[[], object] | None = None) -> bool:
    """Touches all pages, then calls `then`, in other threads within `resident_later`; elsewhere, or for few bytes,
    returns False."""
    touching: _TouchLater | None = getattr(_LATER, "touching", None)
    if touching is None or nbytes < _STEP:
        return False
    touching.add(*_touches(mapping, begin, nbytes, beside=True), then)
    return True


_Piece = tuple[int, int]
"""Bytes of a mapping: from which on, how many."""


def _touches(
    mapping: mmap.mmap, begin: int, nbytes: int, *, beside: bool = False
) -> tuple[list[_Piece], Callable[[_Piece], None]]:
    """Asks for huge pages; returns the pieces of a mapping that are to be touched, and what touches one.

    `beside`: others write there meanwhile.
    """
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, begin, nbytes)
        if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            say_once(
                "zerokern.memory",
                "arena memory has no huge pages (/sys/kernel/mm/transparent_hugepage/enabled says never)",
            )
    except OSError as error:
        say_once("zerokern.memory", f"arena memory has no huge pages (madvise: {error.strerror})")
    start = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()

    def touch(piece: _Piece) -> None:
        at, count = piece
        error = _populate(start + at, count)
        if error == EINVAL:  # before Linux 5.14
            if not beside:  # zeros would overwrite what the others have written
                torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=at).zero_()
        elif error:
            check_fits(nbytes, "an arena", because=f"the system said {os.strerror(error)} while touching it")

    return [(at, min(_STEP, begin + nbytes - at)) for at in range(begin, begin + nbytes, _STEP)], touch


def _make_resident(mapping: mmap.mmap, begin: int, nbytes: int) -> None:
    """Asks for huge pages and touches every page, so that no page fault comes once transfers run.

    Many gigabytes are touched by several threads at once.
    """
    pieces, touch = _touches(mapping, begin, nbytes)
    if len(pieces) == 1:
        touch(pieces[0])
        return
    # the system clears each page in the thread that asks: one core clears 100 GB in most of a minute
    with ThreadPoolExecutor(min(len(pieces), env.usable_cpus(), _TOUCHING)) as pool:
        touched = [pool.submit(touch, piece) for piece in pieces]
        try:
            for one in touched:
                one.result()
        finally:  # after an error or Ctrl-C nobody waits for the pieces that have not begun
            for one in touched:
                one.cancel()


def _populate(address: int, nbytes: int) -> int:
    """Makes pages resident, without the lock of the interpreter; returns 0 or the error's number."""
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
        return ctypes.get_errno()
    return 0


def never_unmap(mapping: weakref.ref[mmap.mmap]) -> None:
    """Keeps a mapping from being unmapped in a forked child, where its addresses may hold something else by then."""
    alive = mapping()
    if alive is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive))


def _name(code: int) -> str:
    return errorcode.get(code) or native.library().zk_error_text(code).decode()
