"""Inputs that are kept for a recomputation: they leave while the next one computes, and are back one ahead in backward.

What is kept latest stays where it is: a backward would need it at once. One memory is stored once, whoever saves views
of it. Host memory is taken once, in blocks that are used again; a few copies are under way at a time, not more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.activations.stretch import has_gaps, span_of, stretch
from zerokern.activations.version import CHANGED, Version
from zerokern.core.errors import ZerokernError
from zerokern.io import Nvme
from zerokern.io.place import NvmePlace, Record
from zerokern.memory import Copies, HostPlace, Wanted
from zerokern.memory.copies import Copy
from zerokern.memory.staging import Ticket, driver_of
from zerokern.zero import hooks
from zerokern.zero.resting import folder_below

__all__ = ["ROLE", "Keeper", "Kept", "Turn", "View"]

LEAST = 1 << 20
"""Bytes: what is smaller stays where it is"""
UNDER_WAY = 2  # tensors on their way out
SLACK = 2  # a block serves what is smaller, down to this part of it
ROLE = "kept inputs"
_NUMBERS = itertools.count()

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Block:
    """Host memory, and what last moved to or from it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Copy | None = None


class Keeper:
    """What is kept in one place: `"cpu"`, for tensors that lie on a device, or a disk.

    >>> import tempfile
    >>> x = torch.ones(1 << 19)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keeper = Keeper(zk.Nvme(folder))
    ...     turn = keeper.begin()
    ...     packed = turn.pack(x)
    ...     following = keeper.begin()
    ...     keeper.held(), turn.unpack(packed).sum()
    ({'kept inputs': 2097152}, tensor(524288.))
    """

    def __init__(self, keep: str | Nvme) -> None:
        self.lock = threading.RLock()
        self.moved_nbytes = 0  # out, so far
        self.disk: NvmePlace | None = None
        if isinstance(keep, Nvme):  # other keepers of this process, and other ranks, have the same path
            self.disk = NvmePlace(folder_below(keep, f"inputs-{next(_NUMBERS)}"), ROLE, staged=False)
        self._host = HostPlace(ROLE)
        self._free: list[Block] = []
        self._copies: dict[Any, Copies] = {}
        self._turns: list[weakref.ref[Turn]] = []
        self._leaving: deque[weakref.ref[Kept]] = deque()
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Kept]]]] = {}

    def begin(self) -> Turn:
        """A recomputed function is about to be called: what the one before it kept leaves."""
        with self.lock:
            self._turns = [one for one in self._turns if one() is not None]
            latest = self._turns[-1]() if self._turns else None
            turn = Turn(self)
            self._turns.append(weakref.ref(turn))
            if latest is not None:
                latest.leave()
            return turn

    def before(self, turn: Turn) -> Any:
        """The one that a backward will need after this one."""
        found = None
        for reference in self._turns:
            one = reference()
            if one is turn:
                return found
            found = one if one is not None and one.kept else found
        return None

    def held(self) -> dict[str, int]:
        """Bytes at rest, by role."""
        return self._host.held() if self.disk is None else self.disk.held()

    def copies_of(self, tensor: Tensor) -> Copies | None:
        """What goes between the tensor's device and host memory; None where it lies in host memory."""
        if tensor.is_cuda and tensor.device in self._copies:
            return self._copies[tensor.device]
        driver = driver_of(tensor)
        if driver is None:
            return None
        key = tensor.device if tensor.is_cuda else id(driver)
        if key not in self._copies:
            self._copies[key] = Copies(driver)
        return self._copies[key]

    def moves(self, tensor: Tensor) -> bool:
        """Whether what it keeps leaves where such a tensor lies."""
        return self.disk is not None or self.copies_of(tensor) is not None

    def of(self, tensor: Tensor) -> Kept | None:
        """What stands for the memory of a tensor; None where it is to stay."""
        return self.found(tensor, Kept) if self.moves(tensor) else None

    def found(self, tensor: Tensor, kind: Callable[..., Kept]) -> Kept | None:
        """What stands for the memory of a tensor, made by `kind` the first time; None where it must not move."""
        if not _may_move(tensor):
            return None
        storage = tensor.untyped_storage()
        begin, nbytes = span_of(tensor)
        if has_gaps(tensor):  # with gaps, in which others have theirs
            begin, nbytes = 0, storage.nbytes()
        if nbytes < LEAST or nbytes > 4 * max(tensor.nbytes, LEAST):
            return None
        key = storage._cdata
        weak, there = self._known.get(key, (None, []))
        if weak is None or weak.expired():
            self._known = {one: found for one, found in self._known.items() if not found[0].expired()}
            there = []
            self._known[key] = StorageWeakRef(storage), there
        there[:] = [one for one in there if one() is not None]
        for one in there:
            kept = one()
            if kept is not None and type(kept) is kind and kept.holds(begin, nbytes):
                return kept
        kept = kind(self, tensor, begin, nbytes)
        there.append(weakref.ref(kept))
        return kept

    def make_way(self, leaving: Kept) -> None:
        """One more is on its way out; the host waits where there are many."""
        self._leaving.append(weakref.ref(leaving))
        while len(self._leaving) > UNDER_WAY:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.has_left()

    def take(self, nbytes: int) -> Block:
        """Host memory for so many bytes."""
        fitting = [one for one in self._free if nbytes <= one.memory.numel() <= SLACK * nbytes]
        if fitting:
            found = min(fitting, key=lambda one: one.memory.numel())
            self._free.remove(found)
            return found
        self._free.clear()  # sizes have changed
        (memory,) = self._host.lay_out([Wanted(ROLE, torch.Size([nbytes]), torch.uint8)])
        return Block(memory)

    def give(self, block: Block) -> None:
        """It is of no more use to whoever took it."""
        self._free.append(block)


class Kept:
    """A stretch of memory that is kept: on its device (`_here`), in a block of host memory, or in a record."""

    def __init__(self, keeper: Keeper, tensor: Tensor, begin: int, nbytes: int) -> None:
        self.begin, self.nbytes, self.device = begin, nbytes, tensor.device
        self.views: weakref.WeakSet[View] = weakref.WeakSet()
        self._keeper = keeper
        self._copies = keeper.copies_of(tensor)
        self._here: Tensor | None = stretch(tensor.untyped_storage(), begin, nbytes, tensor.device)
        self._sent_nbytes = 0
        self._unread = 0  # views that are to be read of what has been fetched
        self._block: Block | None = None
        self._record: Record | None = None
        self._going: Ticket | None = None
        self._coming: Callable[[], None] | None = None
        self.version = Version(tensor)

    def holds(self, begin: int, nbytes: int) -> bool:
        """Whether it has these bytes of its memory, as they are now."""
        return self.begin <= begin and begin + nbytes <= self.begin + self.nbytes and not self.version.is_changed

    def leave(self) -> None:
        """Off to where it rests; nobody waits for it, but for those before it where they are many."""
        if self._going is not None or self._here is None or self.version.is_changed:
            return
        span, self._here = self._here, None
        self.send(span)

    def send(self, span: Tensor) -> None:
        """These bytes are what rests."""
        keeper = self._keeper
        keeper.make_way(self)
        if self._copies is not None:
            self._block = keeper.take(span.numel())
            to = self._block.memory[: span.numel()]
            self._going = self._block.last = self._copies.to_host(span, to, after=self._block.last)
        else:
            self._going = self._store(span)
        keeper.moved_nbytes += span.numel()
        self._sent_nbytes = span.numel()

    def _store(self, span: Tensor) -> Ticket:
        disk = self._keeper.disk
        assert disk is not None
        (self._record,) = disk.lay_out([Wanted(ROLE, span.shape, torch.uint8)])
        return disk.store(self._record, span)

    def has_left(self) -> None:
        """Returns once it lies in host memory, or on the disk. What a device gave goes on to the disk from there."""
        if self._going is None:
            return
        self._going.wait()
        if self._keeper.disk is not None and self._record is None:
            assert self._block is not None
            self._going = self._store(self._block.memory[: self._sent_nbytes])
            self._going.wait()
            self._release_block()

    def fetch(self) -> None:
        """It is needed soon."""
        if self._here is not None or self._going is None:
            return
        self._unread = len(self.views)
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._coming = self.come(out)
        self._here = out

    def come(self, out: Tensor) -> Callable[[], None]:
        """What rests is on its way into `out`. The result is called before it is read, on the stream that reads it."""
        keeper, copies, going = self._keeper, self._copies, self._going
        if keeper.disk is None:
            assert copies is not None and self._block is not None
            copy = self._block.last = copies.to_device(self._block.memory[: out.numel()], out, after=going)
            return copy.gate
        self.has_left()
        assert self._record is not None
        block = None if copies is None else keeper.take(out.numel())
        target = out if block is None else block.memory[: out.numel()]
        ticket = keeper.disk.fetch(self._record, target, after=self._going)

        def arrive() -> None:
            ticket.wait()
            if block is not None:
                assert copies is not None
                block.last = copies.to_device(target, out)
                block.last.gate()
                keeper.give(block)

        return arrive

    def read(self) -> Tensor:
        """Its bytes, on its device; for as long as the caller has them, once all views have been read."""
        self.fetch()
        coming, self._coming = self._coming, None
        here = self._here
        assert here is not None
        try:
            if coming is not None:
                coming()
        except BaseException:
            self._here = None
            raise
        self._unread -= 1
        if self._going is not None and self._unread <= 0:
            self._here = None
        return here

    def _release_block(self) -> None:
        if self._block is not None:
            self._keeper.give(self._block)
            self._block = None

    def __del__(self) -> None:
        # in a fork, or at the interpreter's end, there may be nothing to give back to
        with contextlib.suppress(ZerokernError, AttributeError, TypeError), self._keeper.lock:
            if self._record is not None:
                assert self._keeper.disk is not None
                self._keeper.disk.evict([self._record])
            self._release_block()


class View:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("__weakref__", "dtype", "kept", "offset", "shape", "strides", "turn")

    def __init__(self, tensor: Tensor, kept: Kept, turn: Turn) -> None:
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = int(tensor.storage_offset()) * tensor.itemsize - kept.begin
        self.kept, self.turn = kept, turn
        kept.views.add(self)

    def read(self) -> Tensor:
        self.kept.version.check(self.shape)
        return self.of(self.turn.bytes_of(self.kept))

    def of(self, span: Tensor) -> Tensor:
        """The tensor, of the bytes that were kept."""
        first = int(span.storage_offset()) + self.offset
        fresh = torch.empty(0, dtype=self.dtype, device=span.device)
        return fresh.set_(span.untyped_storage(), first // self.dtype.itemsize, self.shape, self.strides)


class Turn:
    """What one call keeps. Hooks for what autograd saves of it: `others` are asked about what does not move."""

    def __init__(self, keeper: Keeper) -> None:
        self.kept: list[Kept] = []
        self._keeper = keeper
        self._others: tuple[Pack, Unpack] | None = hooks.hears_saved()

    def pack(self, saved: Tensor) -> Any:
        with self._keeper.lock:
            kept = self._keeper.of(saved)
            if kept is not None:
                self.kept.append(kept)
                return View(saved, kept, self)
        return self.pack_as_it_is(saved)

    def pack_as_it_is(self, saved: Tensor) -> Any:
        """It does not move."""
        return _Left(saved) if self._others is None else self._others[0](saved)

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is View:
            with self._keeper.lock:
                self.fetch()
                following = self._keeper.before(self)
                found = packed.read()
                if following is not None:
                    following.fetch()
                return found
        if type(packed) is _Left:
            return packed.read()
        assert self._others is not None
        return self._others[1](packed)

    def bytes_of(self, kept: Kept) -> Tensor:
        """What was kept, back where it was."""
        return kept.read()

    def leave(self) -> None:
        """Another one computes."""
        for kept in self.kept:
            kept.leave()

    def fetch(self) -> None:
        """Its recomputation is near."""
        for kept in self.kept:
            kept.fetch()


class _Left:
    """A tensor that stays where it is, as torch would keep it without hooks."""

    __slots__ = ("saved", "version")

    def __init__(self, saved: Tensor) -> None:
        self.saved, self.version = saved if saved.is_leaf else saved.detach(), saved._version

    def read(self) -> Tensor:
        found = self.saved._version
        if found != self.version:
            raise RuntimeError(CHANGED.format(shape=tuple(self.saved.shape), found=found, expected=self.version))
        return self.saved


def _may_move(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
        return False
    if (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor._base, nn.Parameter):  # the graph has it anyway
        return False
    refused = tensor.is_neg() or tensor.is_conj() or tensor.is_inference() or tensor.is_quantized
    return not refused and tensor.numel() > 0
