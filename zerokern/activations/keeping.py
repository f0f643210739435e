"""Inputs that are kept for a recomputation: stored while the next one computes, and fetched one ahead in backward.

What is kept latest stays where it is: a backward would need it at once. What was kept before rests in the first of
several tiers that has room beside what was kept later. One memory is stored once, whoever saves views of it. A few
stores are under way at a time, not more.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerokern.activations.stretch import has_gaps, span_of, stretch
from zerokern.activations.version import CHANGED, Version
from zerokern.core.errors import ZerokernError
from zerokern.memory import Copies, Tier, Wanted
from zerokern.memory.blocks import BlockPool, BlockTier
from zerokern.memory.order import Cascade, TierOrder
from zerokern.memory.staging import Ticket, driver_of
from zerokern.memory.tier import AnyTier
from zerokern.zero import saved_hooks
from zerokern.zero.tiers import own_name

__all__ = ["ROLE", "Keeper", "Kept", "Turn", "View"]

LEAST = 1 << 20
"""Bytes: what is smaller stays where it is"""
UNDER_WAY = 2  # tensors on their way out
ROLE = "kept inputs"
_NUMBERS = itertools.count()

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Keeper:
    """What is kept in one tier, or in several with budgets: those of `keep=`.

    >>> import tempfile
    >>> x = torch.ones(1 << 19)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keeper = Keeper(zk.Nvme(folder))
    ...     turn = keeper.begin()
    ...     packed = turn.pack(x)
    ...     following = keeper.begin()
    ...     keeper.opened.held(), turn.unpack(packed).sum()
    ({'kept inputs': 2097152}, tensor(524288.))
    """

    def __init__(self, keep: AnyTier | Sequence[AnyTier] | TierOrder) -> None:
        self.lock = threading.RLock()
        self.moved_nbytes = 0  # out, so far
        self.order = TierOrder.of("keep", keep)
        config = self.order.config
        # other keepers of this process, and other ranks, are given the same one
        self.opened = None if config is None else config.open(own_name(f"inputs-{next(_NUMBERS)}"), ROLE)
        self.blocks = BlockPool(ROLE)
        self._behind: dict[Any, BlockTier] = {}  # by device
        self._turns: list[weakref.ref[Turn]] = []
        self._leaving: defaultdict[str, deque[weakref.ref[Kept]]] = defaultdict(deque)  # by where they go
        self._known: dict[int, tuple[StorageWeakRef, list[weakref.ref[Kept]]]] = {}
        self._arrange()

    def _arrange(self) -> None:
        """Reads the budgets, of which a model in host memory has one for "device" and "cpu"."""
        self._is_apart = bool(self._behind)
        kinds = self.order.kinds(apart=self._is_apart)
        self._kinds = list(kinds)
        self.resting = Cascade(list(kinds.values()), partial(_move, self._kinds))

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

    def rest(self, kept: Kept, nbytes: int) -> None:
        """It goes where there is room for it; what was kept before makes way. What rests already was kept again."""
        if self._is_apart != bool(self._behind):  # the first that lies on a device
            earlier = self.resting
            self._arrange()
            for reference, _ in earlier.parts():
                if (one := reference()) is not None:
                    first = len(self._kinds) - 1 if one.has_part else self._first(on_device=False)
                    self.resting.add(reference, one.nbytes, first)
        self.resting.add(kept.reference, nbytes, self._first(kept.on_device))

    def _first(self, on_device: bool) -> int:
        """The first tier for a tensor: of one in host memory, beside others on a device, none that is on the device."""
        return int(self._is_apart and not on_device and self._kinds[0] == "device" and len(self._kinds) > 1)

    @property
    def in_stream_order(self) -> bool:
        """Whether what is fetched is there for whatever the device is given next; else the host waits for it."""
        return self.opened is None

    def copies_of(self, tensor: Tensor) -> Copies | None:
        """What goes between the tensor's device and host memory; None where it lies in host memory."""
        tier = self._blocks_of(tensor)
        return None if tier is None else tier.copies

    def tier_of(self, tensor: Tensor) -> Tier[Any] | None:
        """Where such a tensor rests; None where it stays."""
        return self._blocks_of(tensor) or self.opened

    def _blocks_of(self, tensor: Tensor) -> BlockTier | None:
        if tensor.is_cuda and tensor.device in self._behind:
            return self._behind[tensor.device]
        driver = driver_of(tensor)
        if driver is None:
            return None
        key = tensor.device if tensor.is_cuda else id(driver)
        if key not in self._behind:
            self._behind[key] = BlockTier(self.blocks, Copies(driver), self.opened)
        return self._behind[key]

    def moves(self, tensor: Tensor) -> bool:
        """Whether what it keeps leaves where such a tensor lies."""
        return self.tier_of(tensor) is not None

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

    def make_way(self, leaving: Kept, kind: str) -> None:
        """One more is on its way to a kind of tier; the host waits where there are many."""
        under_way = self._leaving[kind]
        under_way.append(leaving.reference)
        while len(under_way) > UNDER_WAY:
            oldest = under_way.popleft()()
            if oldest is not None:
                oldest.has_left(kind)


def _move(kinds: Sequence[str], reference: weakref.ref[Kept], number: int) -> int:
    """No method of the keeper's: the cycle would keep it, and its files, for the garbage collector."""
    kept = reference()
    return 0 if kept is None else kept.rest(kinds[number])


class Kept:
    """A stretch of memory that is kept: on its device (`_here`), or as a part of a tier."""

    def __init__(self, keeper: Keeper, tensor: Tensor, begin: int, nbytes: int) -> None:
        self.begin, self.nbytes, self.device = begin, nbytes, tensor.device
        self.views: weakref.WeakSet[View] = weakref.WeakSet()
        self.reference = weakref.ref(self)
        hash(self.reference)  # now: there is none once the object has gone
        self._keeper = keeper
        self._tier = keeper.tier_of(tensor)
        self.on_device = isinstance(self._tier, BlockTier)
        self._here: Tensor | None = stretch(tensor.untyped_storage(), begin, nbytes, tensor.device)
        self._unread = 0  # views that are to be read of what has been fetched
        self._part: Any = None
        self._going: Ticket | None = None
        self._coming: Callable[[], None] | None = None
        self.version = Version(tensor)

    @property
    def has_part(self) -> bool:
        """Whether it has left its place."""
        return self._part is not None

    def holds(self, begin: int, nbytes: int) -> bool:
        """Whether it has these bytes of its memory, as they are now."""
        return self.begin <= begin and begin + nbytes <= self.begin + self.nbytes and not self.version.is_changed

    def leave(self) -> None:
        """Off to where it rests; nobody waits for it, but for those before it where they are many."""
        if not self.version.is_changed:
            self._keeper.rest(self, self.nbytes)
        elif self._going is None:  # whoever reads it is told so
            self._here = None

    def rest(self, kind: str) -> int:
        """It goes to a kind of tier, from where it is or from the tier before; returns the bytes that it takes there.

        If that raises, it is where it was.
        """
        if self._part is not None:
            begin = getattr(self._going, "begin", None)
            if begin is not None:
                self._keeper.make_way(self, kind)
                begin()
            return self.nbytes
        assert self._here is not None
        if kind == "device" or (kind == "cpu" and not self.on_device):
            if self._here.untyped_storage().nbytes() > self._here.numel():  # all of which it would keep
                self._here = self._here.clone()
            return self._here.numel()
        span, tier = self._here, self._tier
        assert tier is not None
        self._keeper.make_way(self, kind)
        (part,) = tier.lay_out([Wanted(ROLE, span.shape, torch.uint8)])
        try:
            self._going = tier.store(part, span)
        except BaseException:
            tier.evict([part])
            raise
        self._part, self._here = part, None
        self._keeper.moved_nbytes += span.numel()
        return part.block.memory.numel() if kind == "cpu" else span.numel()

    def has_left(self, kind: str) -> None:
        """Returns once it is stored in that kind of tier; it may be on its way to the next."""
        going = self._part.going if kind == "cpu" and self._part is not None else self._going
        if going is not None:
            going.wait()

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
        assert self._tier is not None
        ticket = self._tier.fetch(self._part, out)
        return getattr(ticket, "gate", ticket.wait)

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

    def __del__(self) -> None:
        # in a fork, or at the interpreter's end, there may be nothing to give back to
        with contextlib.suppress(ZerokernError, AttributeError, TypeError), self._keeper.lock:
            self._keeper.resting.discard(self.reference)
            if self._part is not None and self._tier is not None:
                self._tier.evict([self._part])


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


class Turn(saved_hooks.AroundCheckpoint):
    """What one call keeps. Hooks for what autograd saves of it: `others` are asked about what does not move."""

    def __init__(self, keeper: Keeper) -> None:
        self.kept: list[Kept] = []
        self._keeper = keeper
        self._others: tuple[Pack, Unpack] | None = saved_hooks.top_saved_hooks()

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
