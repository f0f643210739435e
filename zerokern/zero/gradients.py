"""Collects the gradients of one bucket in a buffer, reduces them, and shows this rank's shard in `.grad`.

Gradients are added to what the user left in `.grad`; None begins anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for as contiguous_strides

from zerokern.comm import Handle
from zerokern.core.units import SMALL_GRADIENT
from zerokern.memory import Rest
from zerokern.memory.addresses import TensorBodies
from zerokern.zero import checks
from zerokern.zero.hooks import NO_PASS, Inbox, weakly
from zerokern.zero.kinds import local_of
from zerokern.zero.params import BucketEntry, BucketMemory, gather_full
from zerokern.zero.partition import shards_gradients, shards_state
from zerokern.zero.publishing import without_waiting
from zerokern.zero.reducing import Flattening, GradReady, Reducer, References, shares
from zerokern.zero.released import ReleasedMemory
from zerokern.zero.shard import Shard, alias
from zerokern.zero.sharded import Sharded, SpanGradient
from zerokern.zero.tiers import fetched

__all__ = ["GradientBucket"]

_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")
_handed_out = attrgetter("zk_handed_out")


class GradientBucket:
    """One bucket's gradients: which have arrived, the `buffer` they are collected in, and what is `reduced`."""

    leaves_memory = False  # whether what is reduced goes elsewhere until it is used
    rest: Rest | None = None  # where, then

    def __init__(
        self, number: int, memory: BucketMemory, shards: list[Shard], stage: int, dtype: torch.dtype, losses: int | None
    ) -> None:
        self.number, self.memory, self.shards, self.dtype = number, memory, shards, dtype
        self.group, self.bucket = memory.group, memory.bucket
        self.nbytes = self.bucket.padded_numel * dtype.itemsize
        self.called = f"gradients from {memory.called} on"
        self.entries: list[BucketEntry] = memory.entries
        self.replicated = not shards_state(stage)
        # one rank's shard is the bucket: the gradients are flattened where they stay, unless that is in host memory
        self.stays = self.replicated or (self.group.alone and memory.host is None)
        self.lends_buffer = shards_gradients(stage) and not self.stays
        self.released = ReleasedMemory(memory.pool)
        # On a device one launch flattens all. On a CPU one call does where all are small; else each goes at once: its
        # memory and the cache serve the next, and small ones that waited between large ones would fragment the heap.
        on_device = memory.device.type != "cpu"
        # whole gradients are plain tensors, which anybody may write; a device measures its own when it makes a step
        measures = not self.replicated and (not on_device or memory.host is not None)
        self.reducer = Reducer(self.bucket, self.group, losses, whole=self.stays, measures=measures, host=memory.host)
        together = on_device or all(one.place.numel * dtype.itemsize <= SMALL_GRADIENT for one in memory.entries)
        self.waits = [together and one.placed is None for one in memory.entries]
        self.running = self.opened = self.closed = self.launched = self.adds = False
        self._kept: set[int] = set()
        self.absent: set[int] = set()  # places that nothing will arrive at in this pass
        self._dropped: set[int] = set()  # places whose gradients of this pass came when they were frozen
        self.inbox = Inbox()
        self.arrived = self.inbox.arrived
        self._stored: set[int] = set()  # places written in this pass; close() zeroes those that nobody has written
        # what autograd accumulates into, by place; while a pass runs, what the user keeps in their `.grad` is put aside
        self.leaves: list[Tensor] = [one.param if one.full is None else one.full for one in memory.entries]
        self._aside: dict[int, Tensor] = {}
        self._before: list[Tensor | None] = []  # what parameters show while a pass runs, at stage 3
        self._showed_none = False  # whether no parameter showed a gradient when the pass that is running began
        self._waiting_places = [place for place, waits in enumerate(self.waits) if waits]
        self._waiting_leaves = [self.leaves[place] for place in self._waiting_places]
        self._waiting = set(self._waiting_places)
        self.params: list[Tensor] = [one.param for one in memory.entries]
        self.lands_in_params = stage < 3
        self._user_hooks = [hooks for shard in shards for hooks in shard.hooks]
        self.arrived_places: tuple[int, ...] = ()
        self.from_other_leaves: list[tuple[int, Tensor]] = []  # from leaves besides the one that modules compute with
        self.after_launch: Tensor | None = None  # what came after the buffer was sent: reduced at the end of the pass
        self.places_after_launch: set[int] = set()
        self.local: set[int] = set()  # places with gradients of passes under no_sync
        self.held: set[int] = set()  # places whose reduced span holds a reduced gradient
        self.buffer: Tensor | None = None
        self.reduced: Tensor | None = None
        self.shown: list[Tensor] = []
        self.pieces: list[Tensor] = []  # this rank's parts of what is shown
        self.times_shown = 0  # how often other tensors were made to show what is reduced
        self._clean_since: object = None  # the last hand-out of any tensor when none of the pieces was handed out
        self._versions_of = TensorBodies([]).versions
        self.references: References | None = None
        # where each lies in a buffer, which begins its storage
        self._spots = [(entry.shape, contiguous_strides(entry.shape), entry.place.offset) for entry in self.entries]
        self._spans: list[Tensor] = []  # of the buffer, by place
        self._places = frozenset(range(len(self.entries)))
        self.receive: Callable[[int, Tensor], None] | None = None  # what is added to one that is shown
        self.settle: Callable[[], None] | None = None  # returns once no update reads what is shown
        self._settle_shown = weakly(self._settle_all)  # what is shown must not keep the bucket that shows it
        self._land_shown = weakly(self.land)
        self.ready: GradReady | None = None  # what the last pass has reduced, until the next one opens the bucket
        self.listeners: list[Callable[[GradReady], None]] = []
        self._guards: list[Callable[[], None]] = []
        self.keeps = True  # whether the program kept `.grad` past the last step, as far as is known: it may write there
        self.exposed = False  # zk.shards: the pieces' own .grad is what the user sees and drops
        places = [entry.place for entry in self.entries]
        self._flattening = Flattening([one.offset for one in places], [one.numel for one in places], dtype)

    def begin(self, task: int, expected: int, arrived: int | None, *, shows_none: bool) -> None:
        """Begins a pass, in which so many gradients are expected: empties `.grad`, where gradients arrive.

        `task`: the pass that the inbox takes them in; NO_PASS: each is looked at. `arrived`: the place of one that has
        come already. `shows_none`: no parameter shows a gradient.
        """
        self.inbox.expected, self.inbox.task = expected, task
        leaves = self.leaves if self.lands_in_params and not shows_none else ()
        self._aside = {place: grad for place, grad in enumerate(map(_grad_of, leaves)) if grad is not None}
        if arrived is not None and not self._shows_in_leaf(arrived):
            self._aside.pop(arrived, None)
        if not self.lands_in_params:
            self._before = [None] * len(self.params) if shows_none else list(map(_grad_of, self.params))
        self.running, self._showed_none = True, shows_none  # before `.grad` is emptied: who breaks off puts it back
        for place in self._aside.keys() - {arrived}:
            self.leaves[place].grad = None

    def take_written(self) -> None:
        """Takes gradients that a custom Function wrote into a `.grad` in this pass: no hook is called for them."""
        if not self.running:
            return
        if not self.lands_in_params:
            self._take_written_to_params()
        if not self.closed and len(self.arrived) == len(self.entries):
            return
        for place, grad in enumerate(list(map(_grad_of, self.leaves))):
            if grad is None or grad is self._aside.get(place) or (place in self.arrived and not self.closed):
                continue
            if not self._shows_in_leaf(place):
                self.leaves[place].grad = None
                self.take_from_other_leaf(place, grad)

    def _take_written_to_params(self) -> None:
        grads = list(map(_grad_of, self.params))
        for place, (grad, before) in enumerate(zip(grads, self._before, strict=True)):
            if grad is not None and grad is not before and not self.shows(place, grad):
                self.params[place].grad = before
                self.take_from_other_leaf(place, grad)

    def put_back(self) -> None:
        """Puts back into `.grad` what was there before the pass."""
        with without_waiting():
            for place, grad in self._aside.items():
                self.leaves[place].grad = grad
        self.running = self._showed_none = False  # before it is forgotten: a pass may break off until then
        self._aside, self._before = {}, []

    def break_off(self) -> None:
        """Drops what a pass that ended early has left in leaves, noted or not, and puts back what was there before."""
        if self.running:
            with without_waiting():
                for leaf in self.leaves:
                    leaf.grad = None
            self.put_back()

    def take_arrived(self, place: int, *, at_once: bool) -> None:
        """Takes what autograd has left in a leaf's `.grad`, or added to what is shown there, if there is anything."""
        if not self._counts(place):
            return
        if self._shows_in_leaf(place):
            if self.replicated:  # added there, in the buffer itself
                self._stored.add(place)
            if place not in self._stored:  # a backward function gave it None: autograd calls hooks all the same
                return
        elif self.closed or at_once:
            grad = self._take_out(place)
            if grad is not None:
                self.receive_one(place, grad)
            if place in self._aside:
                self.leaves[place].grad = self._aside[place]
        if not self.closed:
            self.arrived.add(place)

    @property
    def is_full(self) -> bool:
        """Whether no more gradients are expected in this pass."""
        return self.inbox.expected <= len(self.arrived | self.absent if self.absent else self.arrived)

    def take_from_other_leaf(self, place: int, grad: Tensor) -> None:
        """Keeps a gradient of another leaf until the bucket is closed.

        It must not be what completes the bucket: it may have come on this rank alone, and all launch at one time.
        """
        if self._counts(place):
            grad = self._checked(place, grad).detach()
            self._take_after_launch(place, grad) if self.closed else self.from_other_leaves.append((place, grad))

    def add(self, place: int, grad: Tensor) -> None:
        """Adds a part of a gradient; the rest arrives later and is added to it."""
        if not self._counts(place):
            return
        grad = self._checked(place, grad)
        if self.closed:
            self._take_after_launch(place, grad)
        else:
            self._write(place, grad)
            self._kept.add(place)

    def store(self, place: int, grad: Tensor) -> None:
        """Copies a whole gradient into the buffer before the others."""
        self._write(place, grad)
        self._stored.add(place)

    def receive_one(self, place: int, grad: Tensor) -> None:
        """Checks a whole gradient and copies it into the buffer, or adds it to those reduced at the end."""
        grad = self._checked(place, grad)
        self._take_after_launch(place, grad) if self.closed else self.store(place, grad)

    def _counts(self, place: int) -> bool:
        """Returns whether the parameter is trained; what arrives after it was frozen is dropped."""
        with without_waiting():
            trained = self.params[place].requires_grad
        if not trained:
            self._drop(place)
        elif place in self._dropped:
            checks.thawed(self.entries[place].name)
        return trained

    def _checked(self, place: int, grad: Tensor) -> Tensor:
        entry = self.entries[place]
        return checks.gradient(entry.name, grad, entry.placed)

    def _write(self, place: int, grad: Tensor) -> None:
        there = place in self._kept or place in self._stored
        self._spans[place].add_(grad) if there else self._spans[place].copy_(grad)

    def _shows_in_leaf(self, place: int) -> bool:
        """Whether the gradient in a leaf's `.grad` is the one shown to the user."""
        grad = self.leaves[place].grad if self.lands_in_params else None
        return isinstance(grad, Sharded) or self.shows(place, grad)

    def _take_out(self, place: int) -> Tensor | None:
        if self._shows_in_leaf(place):
            return None
        with without_waiting():  # at stage 3 a leaf without memory stands for the parameter
            grad, self.leaves[place].grad = self.leaves[place].grad, None
        return grad

    def _drop(self, place: int) -> None:
        """Drops the gradient of a parameter that was frozen since the forward, as autograd does."""
        if place in (self.arrived_places if self.closed else self._kept & self.arrived):
            checks.thawed(self.entries[place].name)
        self._take_out(place)
        self._dropped.add(place)
        self.inbox.task = NO_PASS
        self.arrived.discard(place)
        self._stored.discard(place)
        self.from_other_leaves = [one for one in self.from_other_leaves if one[0] != place]

    def _take_after_launch(self, place: int, grad: Tensor) -> None:
        """Adds a gradient that arrived after the bucket was closed."""
        into = self.buffer
        if self.launched:
            self.places_after_launch.add(place)
            into = self.after_launch = self._zeros() if self.after_launch is None else self.after_launch
        else:
            self.local.add(place)
            self.arrived_places += (place,)
        assert into is not None
        into.as_strided(*self._spots[place]).add_(grad)

    def _zeros(self) -> Tensor:
        return self.memory.pool.zeros(self.bucket.padded_numel, self.dtype)

    def kept_gradients(self) -> dict[int, Tensor]:
        """Returns what the user has in `.grad`, by place, whatever arrives there now."""
        if self.running and self.lands_in_params and not self.exposed:
            return self._aside
        if self._showed_none and not self.exposed:  # what is there now was written in this pass
            return {}
        with without_waiting():
            found = list(map(_grad_of, [shard.piece for shard in self.shards] if self.exposed else self.params))
        return {place: grad for place, grad in enumerate(found) if grad is not None}

    def _lives(self) -> set[int]:
        """Returns the places where the user kept `.grad`, so that it is added to."""
        kept = self.kept_gradients()
        for place, grad in list(kept.items()):
            if not self.shows(place, grad):
                self._adopt(place, grad)
        return set(kept)

    def _adopt(self, place: int, grad: Tensor) -> None:
        """Takes a gradient that was set by hand; it counts as reduced already."""
        shard = self.shards[place]
        self._show()
        self.land()
        with fetched([grad], written=()):
            span = grad if self.exposed else shard.part_of(grad)
            self.reduced_span(place).copy_(span.reshape(-1) if self.replicated else span)
        self.give([place])
        self.held.add(place)

    def shows(self, place: int, grad: Tensor | None) -> bool:
        """Whether this is the gradient that was put where the user looks for it."""
        if not self.shown or grad is None:
            return False
        return shares(grad, self.reduced) if self.exposed else self._own(place) is grad  # type: ignore[arg-type]

    def _own(self, place: int) -> Tensor:
        """Returns what shows a gradient; makes it anew where it was given other memory (`.data =`)."""
        shown, entry = self.shown[place], self.entries[place]
        if self.replicated and self.reduced is not None and not shares(local_of(shown), self.reduced):
            self.shown[place] = entry.show(alias(self.reduced, entry.place.offset, entry.shape))
        return self.shown[place]

    def reduced_span(self, place: int) -> Tensor:
        """Returns this rank's part of what is reduced of a parameter."""
        shown = self.shown[place]
        return shown.span if isinstance(shown, Sharded) else local_of(shown).view(-1)

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

    def spare_kept_gradients(self) -> None:
        """Moves to other memory if the program has kept a gradient that `.grad` shows no more (gradient surgery)."""
        self.ready = None
        if self.reduced is None or self.references is None:
            return
        live = {at for at, grad in self.kept_gradients().items() if self.exposed or grad is self.shown[at]}
        views = len(live) if self.exposed and self.replicated else 0
        if self.references.has_more(self.reduced, live, views):
            self._move(live)

    def _move(self, live: set[int], *, out: bool = False) -> None:
        """Moves what is reduced to other memory, with what is shown of it; `out` of the buffer, if it lies there."""
        self.released.restore(self)
        self.shown = []
        if self.in_place and not out:
            self._lay(self.buffer.clone())  # type: ignore[union-attr]
            self.reduced = self._room()
        else:
            self.land()
            kept = self.reduced
            self.reduced = kept.clone() if self.memory.host is None else self._room().copy_(kept)  # type: ignore[arg-type,union-attr]
        self._make_shown()
        self.give(live)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what is reduced and shown, and counts that as a write to each."""
        if self.held and self.reduced is not None and any(self.shows(*one) for one in self.kept_gradients().items()):
            self._settle_all()
            self.reduced.mul_(factor)
            torch.autograd.graph.increment_version([self.reduced_span(at) for at in self.held])

    def open(self, buffer: Tensor) -> None:
        """Collects this pass in `buffer`, added to what passes under no_sync left there."""
        self.guard()
        was_read, self._guards = bool(self._guards), []
        self.ready = None
        self.released.begin(self)
        self._lay(buffer)
        with without_waiting():  # whoever waits for gradients waits for `_guard`
            if self.running and not self.lands_in_params and not self._showed_none:
                self._take_written_to_params()
            lives = self._lives()
        if self.shown:  # what they show is about to be written
            torch.autograd.graph.increment_version([self.reduced_span(place) for place in lives])
        self.keeps = bool(lives) if was_read else self.keeps
        self.local &= lives
        self.held &= lives
        if self.held and self.in_place and not self.stays:
            self._move(self.held, out=True)
        if self.reducer.counts_again:
            self.reducer.share_out(self._spans[place] for place in self.held)
            self.held.clear()
        self._kept = lives if self.stays else set(self.local)
        self.adds = not self.stays and bool(self.held)
        self.opened = True

    def _lay(self, buffer: Tensor) -> Tensor:
        """Sets the buffer. Its spans are cached, and made before references to the memory are counted."""
        self.buffer = buffer
        if not self._spans or self._spans[0].untyped_storage()._cdata != buffer.untyped_storage()._cdata:
            self._spans = [buffer.as_strided(*spot) for spot in self._spots]
        return buffer

    def close(self, *, reduces: bool) -> bool:
        """Completes the buffer, with zeros where nothing arrived; returns whether to add to `reduced`."""
        assert self.buffer is not None
        with without_waiting():
            self.take_written()
        self.closed, self.inbox.task = True, NO_PASS
        self._collect(self.buffer)
        for place, grad in self.from_other_leaves:
            self.store(place, grad)
            self.arrived.add(place)
        self.from_other_leaves.clear()
        for place in self._places - self._stored - self._kept:
            self._spans[place].zero_()
        if self.adds or not reduces:  # zeros where something else is, or where it is to be shown unreduced
            self._show()
            if new := set() if self.in_place else self._places - self.held:
                self.land()
            for place in new:
                self.reduced_span(place).zero_()
        if not reduces:
            self.local |= self.arrived
        return self.adds

    def _collect(self, buffer: Tensor) -> None:
        """Copies what has arrived into the buffer, in one call for what is copied and one for what is added."""
        places = self.arrived - self._stored
        with without_waiting():
            if places == self._waiting and not places & self._kept and not torch.is_grad_enabled():
                leaves = self._waiting_leaves
                if self._flattening.of_all(leaves, self._waiting_places, buffer):
                    for leaf in leaves:
                        leaf.grad = None
                    self._stored |= places
                    return
            grads = {place: grad for place in sorted(places) if (grad := self.leaves[place].grad) is not None}
            for place in grads:
                self.leaves[place].grad = None
        for place, grad in grads.items():
            grads[place] = self._checked(place, grad)
        self._stored |= grads.keys()
        self.arrived &= self._stored
        more = {place: grads.pop(place) for place in list(grads) if place in self._kept}
        self._flattening.run(more, buffer, add=True)
        self._flattening.run(grads, buffer)

    @property
    def in_place(self) -> bool:
        """Whether the reduced shard lies in the buffer."""
        return self.reduced is not None and self.buffer is not None and shares(self.reduced, self.buffer)

    def reduce(self, buffer: Tensor, add: bool, scratch: Tensor | None) -> Handle | None:
        """Launches the reduction; returns None where there is nothing to wait for."""
        self.launched = True
        self.local.clear()
        self._show()
        assert self.reduced is not None
        return self.reducer.begin(buffer, self.reduced, add=add, scratch=scratch)

    def reduce_after_launch(self, scratch: Tensor | None) -> None:
        """Adds what arrived after the launch, on any rank, to what is reduced."""
        unsent = self._zeros() if self.after_launch is None else self.after_launch
        self.guard()
        self.released.restore(self)
        assert self.reduced is not None
        self.ready = None
        (self.reducer.begin(unsent, self.reduced, add=True, scratch=scratch) or Handle()).wait()
        if self.stays:
            self.reduced.add_(unsent)
        self.tell()

    def _show(self) -> None:
        if not self.shown:
            self.reduced = self._room() if self.reduced is None else self.reduced
            self._make_shown()

    def _room(self) -> Tensor:
        if self.stays:
            return self.whole_buffer()
        numel = self.bucket.shard_numel
        if (room := self.reducer.room(numel, self.dtype)) is not None:
            return room
        if self.lends_buffer:
            return self.memory.pool.zeros(numel, self.dtype)
        return alias(self.whole_buffer(), self.group.rank * numel, (numel,))

    def whole_buffer(self) -> Tensor:
        """Returns a buffer of this bucket's own."""
        return self._lay(self._zeros()) if self.buffer is None else self.buffer

    def _make_shown(self) -> None:
        """Shows what is reduced; `shown` is empty until all is made, so that an interrupt has it made anew."""
        assert self.reduced is not None
        shown: list[Tensor] = []
        spans = {piece.param: piece for piece in self.bucket.pieces(self.group.rank)}
        for number, (entry, shard) in enumerate(zip(self.entries, self.shards, strict=True)):
            if self.replicated:
                shown.append(entry.show(alias(self.reduced, entry.place.offset, entry.shape)))
                continue
            piece = spans.get(entry.place.param)
            local: Any = alias(self.reduced, 0 if piece is None else piece.offset, (shard.numel,))
            local.zk_handed_out, local.zk_rest = False, self.rest
            named = Sharded.of(local, shard.here, name=shard.name, kind="gradient")
            named.settle, named.land = self._settle_shown, self._land_shown
            named.receive = None if self.receive is None else partial(self.receive, number)
            named.gather_full = partial(gather_full, self.group, self.bucket.shard_numel, entry.place, entry.placed)
            shown.append(named)
            del named, local
        self.times_shown += 1
        self._clean_since = Sharded.last_hand_out
        self.pieces = [] if self.replicated else [one.span for one in shown]  # type: ignore[attr-defined]
        self._versions_of = TensorBodies(self.pieces).versions
        self.references = References(self.reduced, shown)
        self.shown = shown

    def tell(self) -> None:
        """Tells listeners that what is reduced is there, on a device for the current stream."""
        assert self.reduced is not None
        if self.leaves_memory:
            self.land()
        pieces = list(map(self.reduced_span, range(len(self.shown)))) if self.replicated else self.pieces
        versions = array("q", map(_version_of, pieces)) if self.replicated else self._versions_of()
        sums = [None] * len(pieces) if self.exposed else self.reducer.sums(pieces, everything=self.leaves_memory)
        self.ready = GradReady(pieces, versions, sums)
        for listener in self.listeners:
            listener(self.ready)

    def land(self) -> None:
        """Returns once what was reduced is in its memory, on the host or on the device: for who reads or writes it."""
        self.released.used = True
        self.released.restore(self)
        self.reducer.wait()

    @property
    def in_use(self) -> bool:
        """Whether its memory is needed here: for a pass, by who uses gradients after each, or was handed out."""
        used = self.released.stays or self.released.used or self.local or (self.opened and not self.launched)
        return bool(used) or self.references is None or self.handed_out()

    def reads_until(self, wait: Callable[[], None]) -> None:
        """Makes whoever writes what is reduced call `wait` first: something reads it until then."""
        self._guards.append(wait)

    def _settle_all(self) -> None:
        if self.settle is not None:
            self.settle()
        self.land()
        self.guard()

    def guard(self) -> None:
        """Returns once what is reduced may be written where it lies: nothing reads it any more."""
        for wait in self._guards:
            wait()

    def settles(self, settle: Callable[[], None]) -> None:
        """Makes whoever uses a shown gradient call `settle` first: updates that read it may be under way."""
        self.settle = settle

    def give(self, places: Iterable[int]) -> None:
        """Shows the gradients in `.grad`."""
        self._show()
        aside = self._aside if self.running and self.lands_in_params else None
        for place in places:
            if self.exposed:
                shard = self.shards[place]
                shard.piece.grad = SpanGradient.of(self.reduced_span(place), shard.name, shard.here.group)
                continue
            shown = self._own(place) if self.replicated else self.shown[place]
            if aside is None:
                self.params[place].grad = shown
            else:
                aside[place] = shown

    def call_hooks(self, places: Iterable[int]) -> None:
        """Calls users' hooks on the accumulation of these gradients, in the order of the model's parameters."""
        some = [place for place in places if self.shards[place].has_hooks] if any(self._user_hooks) else []
        for place in sorted(some, key=lambda place: self.bucket.places[place].param):
            self.shards[place].call_hooks(self.shards[place].piece if self.exposed else self.entries[place].param)

    def refuse_unreduced(self) -> None:
        """Refuses a step on gradients of passes under no_sync alone."""
        checks.unreduced(self)

    def reset(self) -> None:
        """Ends a pass, whether it finished or not."""
        self.break_off()
        for noted in (self.arrived, self._stored, self.from_other_leaves, self.absent, self._dropped):
            noted.clear()
        self.inbox.task = NO_PASS
        self.launched = self.opened = self.closed = False
        self.after_launch, self.places_after_launch, self.arrived_places = None, set(), ()
        if self.lends_buffer and not self.local and self.buffer is not None:
            self.buffer, self._spans = None, []
