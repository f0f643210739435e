"""`ShownGradients`: what `.grad` shows of one bucket's reduced gradients, and who reads, writes or has kept it.

On a device their memory can be given back until somebody uses it, while copies in host memory stand for it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zerokern.memory import Rest
from zerokern.memory.addresses import TensorBodies, storage_references
from zerokern.memory.tier import DevicePool
from zerokern.zero.hooks import weakly
from zerokern.zero.kinds import is_divided, local_of
from zerokern.zero.params import BucketMemory, gather_full
from zerokern.zero.reducing import GradReady, Reducer, Sumsq
from zerokern.zero.shard import Shard, alias
from zerokern.zero.sharded import Sharded

__all__ = ["Fetch", "ReleasedMemory", "ShownGradients", "shares"]

_version_of = attrgetter("_version")
_handed_out = attrgetter("zk_handed_out")


Fetch = Callable[[Sequence[Tensor] | None], None]
"""Copies the values of all pieces back into them, before whoever is next on the current stream, or on the host; None:
they are not needed any more."""


class ShownGradients:
    """This rank's part of one bucket's `reduced` gradients, and the `tensors` that show it in `.grad`, by place.

    It tells whether the program has kept any of them: by references that were not there at first.
    """

    rest: Rest | None = None  # where what is reduced lies until it is used, if it leaves memory

    def __init__(self, memory: BucketMemory, shards: Sequence[Shard], reducer: Reducer, *, replicated: bool) -> None:
        self._memory, self.shards, self._reducer, self.replicated = memory, shards, reducer, replicated
        self.exposed = False  # zk.shards: the pieces' own .grad is what the user sees and drops
        self.reduced: Tensor | None = None
        self.tensors: list[Tensor] = []
        self.pieces: list[Tensor] = []  # this rank's parts of these
        self.held: set[int] = set()  # places whose reduced span holds a reduced gradient
        self.times_made = 0  # how often other tensors were made to show what is reduced
        self.references_to_memory = 0
        self._references = 0  # to all tensors, and to the local ones within
        self._locals: dict[int, Tensor] = {}  # the tensors within, by place
        self._clean_since: object = None  # the last hand-out of any tensor when none of the pieces was handed out
        self._versions_of = TensorBodies([]).versions
        self.receive: Callable[[int, Tensor], None] | None = None  # what is added to one that is shown
        self.settle: Callable[[], None] = lambda: None  # returns once no update reads what is shown
        self.released = ReleasedMemory(memory.pool)
        self.ready: GradReady | None = None  # what the last pass has reduced, until the next one opens the bucket
        self.listeners: list[Callable[[GradReady], None]] = []
        self._guards: list[Callable[[], None]] = []
        self.keeps = True  # whether the program kept `.grad` past the last step, as far as is known: it may write there

    def make(self, reduced: Tensor) -> None:
        """Shows what is reduced; `tensors` is empty until all is made, so that an interrupt has it made anew."""
        self.reduced, self.tensors, tensors = reduced, [], []
        memory, group = self._memory, self._memory.group
        settle, land = weakly(self.wait), weakly(self.land)  # what is shown must not keep the bucket that shows it
        spans = {piece.param: piece for piece in memory.bucket.pieces(group.rank)}
        for number, (entry, shard) in enumerate(zip(memory.entries, self.shards, strict=True)):
            if self.replicated:
                tensors.append(entry.show(alias(reduced, entry.place.offset, entry.shape)))
                continue
            piece = spans.get(entry.place.param)
            local: Any = alias(reduced, 0 if piece is None else piece.offset, (shard.numel,))
            local.zk_handed_out, local.zk_rest = False, self.rest
            named = Sharded.of(local, shard.here, name=shard.name, kind="gradient")
            named.settle, named.land = settle, land
            named.receive = None if self.receive is None else partial(self.receive, number)
            named.gather_full = partial(gather_full, group, memory.bucket.shard_numel, entry.place, entry.placed)
            tensors.append(named)
            del named, local
        self.times_made += 1
        self._clean_since = Sharded.last_hand_out
        self.pieces = [] if self.replicated else [one.span for one in tensors]  # type: ignore[attr-defined]
        self._versions_of = TensorBodies(self.pieces).versions
        self._locals = {place: local_of(one) for place, one in enumerate(tensors) if is_divided(one)}
        self.references_to_memory = storage_references(reduced)
        self._references = _references(tensors) + _references(self._locals.values())
        self.tensors = tensors

    def has_kept(self, live: AbstractSet[int]) -> bool:
        """Whether the program has kept gradients other than those that are `live`, by place."""
        assert self.reduced is not None
        views = len(live) if self.exposed and self.replicated else 0
        if storage_references(self.reduced) > self.references_to_memory + views:
            return True
        if not live:
            return _references(self.tensors) + _references(self._locals.values()) > self._references
        places = [place for place in range(len(self.tensors)) if place not in live]
        some = [self.tensors[place] for place in places]
        parts = [self._locals[place] for place in places if place in self._locals]
        each = self._references / max(len(self.tensors), 1)
        return _references(some) + _references(parts) - len(some) - len(parts) > each * len(some)

    def shows(self, place: int, grad: Tensor | None) -> bool:
        """Whether this is the gradient that was put where the user looks for it."""
        if not self.tensors or grad is None:
            return False
        return shares(grad, self.reduced) if self.exposed else self.tensor(place) is grad  # type: ignore[arg-type]

    def tensor(self, place: int) -> Tensor:
        """Returns what shows a gradient; makes it anew where it was given other memory (`.data =`)."""
        if self.replicated and not shares(local_of(self.tensors[place]), self.reduced):  # type: ignore[arg-type]
            entry = self._memory.entries[place]
            self.tensors[place] = entry.show(alias(self.reduced, entry.place.offset, entry.shape))  # type: ignore[arg-type]
        return self.tensors[place]

    def span(self, place: int) -> Tensor:
        """Returns this rank's part of what is reduced of a parameter."""
        shown = self.tensors[place]
        return shown.span if isinstance(shown, Sharded) else local_of(shown).view(-1)

    def spans(self) -> list[Tensor]:
        """Returns this rank's part of each."""
        return list(map(self.span, range(len(self.tensors)))) if self.replicated else self.pieces

    def make_ready(self, pieces: Sequence[Tensor], sums: Sequence[Sumsq]) -> GradReady:
        """Notes that what is reduced is there, this rank's `pieces`, with the sums of their squares."""
        versions = array("q", map(_version_of, pieces)) if self.replicated else self._versions_of()
        self.ready = GradReady(pieces, versions, [None] * len(pieces) if self.exposed else sums)
        return self.ready

    def is_untouched(self) -> bool:
        """Whether nobody has written to what is ready, or can have done so unseen."""
        return self.ready is not None and not self.handed_out() and self._versions_of() == self.ready.versions

    def handed_out(self) -> bool:
        """Whether gradients may be written where nobody counts it: plain tensors, and what was taken out of others."""
        if self.exposed or self.replicated:
            return True
        last = Sharded.last_hand_out  # before the marks are read: another thread may hand one out meanwhile
        if self._clean_since is not last:
            if any(map(_handed_out, self.pieces)):
                return True
            self._clean_since = last
        return False

    def land(self) -> None:
        """Returns once what was reduced is in its memory, on the host or on the device: for who reads or writes it."""
        self.released.used = True
        self.released.restore(self)
        self._reducer.wait()

    def reads_until(self, wait: Callable[[], None]) -> None:
        """Makes whoever writes what is reduced call `wait` first: something reads it until then."""
        self._guards.append(wait)

    def guard(self) -> None:
        """Returns once what is reduced may be written where it lies: nothing reads it any more."""
        for wait in self._guards:
            wait()

    def end_reads(self) -> bool:
        """Waits as `guard`, and forgets who has read; returns whether anybody has."""
        self.guard()
        was_read, self._guards = bool(self._guards), []
        return was_read

    def wait(self) -> None:
        """Returns once what is reduced may be read and written: for who uses what is shown."""
        self.settle()
        self.land()
        self.guard()


class ReleasedMemory:
    """The memory of one bucket's reduced gradients, which is released while copies in host memory stand for it.

    The storage stays the same object, empty meanwhile, so that all views of it are right again once it has memory.

    >>> from types import SimpleNamespace
    >>> memory, reduced = ReleasedMemory(DevicePool(torch.device("cpu"))), torch.ones(4)
    >>> shown = SimpleNamespace(reduced=reduced, pieces=[reduced[:2]], references_to_memory=9)
    >>> memory.release(shown, lambda pieces: pieces[0].fill_(2.0)), reduced.untyped_storage().nbytes()
    (True, 0)
    >>> memory.restore(shown); reduced
    tensor([2., 2., 0., 0.])
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._fetch: Fetch | None = None
        self._nbytes = 0
        self.used = False  # by the program, since the last pass began
        self.stays = False  # used after the pass before: to bring it back each time would cost more than it gives

    @property
    def is_released(self) -> bool:
        """Whether the gradients have no memory here."""
        return self._fetch is not None

    def begin(self) -> None:
        """Begins a pass, which is about to collect gradients here."""
        self.stays, self.used = self.used, False

    def release(self, shown: Any, fetch: Fetch, *, more: int = 0) -> bool:
        """Frees the memory, unless somebody has views of it; returns whether it did.

        `fetch` is called once somebody needs the values again, with the pieces to fill. `more`: references to it by
        copies under way, which the current stream waits for.
        """
        storage = shown.reduced.untyped_storage()
        if self.is_released or not storage.resizable():
            return False
        if storage_references(shown.reduced) > shown.references_to_memory + more:
            return False
        self._nbytes, self._fetch = storage.nbytes(), fetch
        storage.resize_(0)
        return True

    def restore(self, shown: Any, *, fetch: bool = True) -> None:
        """Allocates the memory anew, if it was released; `fetch`: with the values."""
        if not self.is_released:
            return
        storage = shown.reduced.untyped_storage()
        with self._pool.lasting():
            storage.resize_(self._nbytes)
        get, self._fetch = self._fetch, None  # last: without memory for them they are where they were
        if fetch:  # else a pass writes all of it: what was given, and zeros where nothing was
            torch.empty(0, dtype=torch.uint8, device=shown.reduced.device).set_(storage).zero_()
        if get is not None:
            get(shown.pieces if fetch else None)

    def forget(self) -> None:
        """Gives the values up, if the memory was released: it will have zeros if somebody asks for it nevertheless."""
        get, self._fetch = self._fetch, None if self._fetch is None else _forgotten
        if get is not None:
            get(None)


def _forgotten(pieces: Sequence[Tensor] | None) -> None:
    pass


def shares(left: Tensor, right: Tensor) -> bool:
    """Returns whether two tensors share a storage.

    >>> whole = torch.zeros(4)
    >>> shares(whole[1:], whole), shares(whole.clone(), whole)
    (True, False)
    """
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)


def _references(tensors: Iterable[Tensor]) -> int:
    return sum(map(sys.getrefcount, tensors))
