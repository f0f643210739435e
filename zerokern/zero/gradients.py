"""The gradients of one bucket: from autograd's tensors into a buffer in one pass, from there into this rank's shard.

What gradients are added to is decided by what the user left in `.grad`: None begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import Handle
from zerokern.zero import checks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.fetching import fetched
from zerokern.zero.flattening import Flattening
from zerokern.zero.hooks import NO_PASS, Inbox, weakly
from zerokern.zero.kinds import local_of
from zerokern.zero.landing import IntoHost
from zerokern.zero.params import BucketMemory, Tenant, whole_like
from zerokern.zero.partition import shards_gradients, shards_state
from zerokern.zero.references import References, shares
from zerokern.zero.shard import Shard, alias, strides
from zerokern.zero.sharded import Sharded
from zerokern.zero.span_gradients import SpanGradient
from zerokern.zero.squares import BucketSquares, GradReady
from zerokern.zero.summing import Summing

__all__ = ["GradientBucket"]

SMALL = 64 << 10  # bytes of a gradient on a CPU up to which a call costs more than copying it at once saves

_grad_of = attrgetter("grad")
_is_trained, _version_of = attrgetter("requires_grad"), attrgetter("_version")
_handed_out = attrgetter("zk_handed_out")


class GradientBucket:
    """What arrived of a bucket's gradients, where they are gathered up (`buffer`) and where they end (`reduced`)."""

    leaves_memory = False  # whether what is reduced goes elsewhere until it is used

    def __init__(
        self, number: int, memory: BucketMemory, homes: list[Shard], stage: int, dtype: torch.dtype, losses: int | None
    ) -> None:
        self.number, self.memory, self.homes, self.dtype = number, memory, homes, dtype
        self.group, self.bucket = memory.group, memory.bucket
        self.nbytes = self.bucket.padded_numel * dtype.itemsize
        self.tenants: list[Tenant] = memory.tenants
        self.replicated = not shards_state(stage)
        # one rank's shard is the bucket: the gradients are flattened where they stay, unless that is in host memory
        self.stays = self.replicated or (self.group.alone and memory.host is None)
        self.lends_buffer = shards_gradients(stage) and not self.stays
        self.landing = None if memory.host is None else IntoHost(self.group, memory.host)
        self.summing = Summing(self.group, losses, whole=self.stays, landing=self.landing)
        # on a device one launch flattens all; on a CPU one call the small ones; each of the others goes at once: its
        # memory, and the cache, serve the next
        on_device = memory.device.type != "cpu"
        self.waits = [
            one.placed is None and (on_device or one.place.numel * dtype.itemsize <= SMALL) for one in memory.tenants
        ]
        self.opened = self.closed = self.launched = self.adds = False
        self._kept: set[int] = set()
        self.absent: set[int] = set()  # places that nothing will arrive at in this pass
        self._dropped: set[int] = set()  # places whose gradients of this pass came when they were frozen
        self.inbox = Inbox()
        self.arrived = self.inbox.landed
        self._stored: set[int] = set()  # places of this pass whose gradients lie in the buffer
        # what autograd accumulates into, by place; while a pass runs, what the user keeps in their `.grad` is put aside
        self.leaves: list[Tensor] = [one.param if one.full is None else one.full for one in memory.tenants]
        self._aside: dict[int, Tensor] = {}
        self._before: list[Tensor | None] = []  # what parameters show while a pass runs, at stage 3
        self._waiting_places = [place for place, waits in enumerate(self.waits) if waits]
        self._waiting_leaves = [self.leaves[place] for place in self._waiting_places]
        self._waiting = set(self._waiting_places)
        self._params: list[Tensor] = [one.param for one in memory.tenants]
        self.lands_in_params = stage < 3
        self._user_hooks = [hooks for home in homes for hooks in home.hooks]
        self.running = False
        self.arrived_places: tuple[int, ...] = ()
        self.beside: list[tuple[int, Tensor]] = []  # from leaves besides the one that modules compute with
        self.late: Tensor | None = None  # what arrived after the buffer had been sent: reduced at the end of the pass
        self.late_places: set[int] = set()
        self.local: set[int] = set()  # places with gradients of passes under no_sync
        self.held: set[int] = set()  # places whose reduced span holds a reduced gradient
        self.buffer: Tensor | None = None
        self.reduced: Tensor | None = None
        self.shown: list[Tensor] = []
        self._pieces: list[Tensor] = []  # this rank's parts of what is shown
        self._references: References | None = None
        # where each lies in a buffer, which begins its storage
        self._spots = [(tenant.shape, strides(tenant.shape), tenant.place.offset) for tenant in self.tenants]
        self._spans: list[Tensor] = []  # of the buffer, by place
        self._places = frozenset(range(len(self.tenants)))
        self.receive: Callable[[int, Tensor], None] | None = None  # what is added to one that is shown
        self.settle: Callable[[], None] | None = None  # returns once no update reads what is shown
        self.ready: GradReady | None = None  # what the last pass has reduced, until the next one opens the bucket
        self.listeners: list[Callable[[GradReady], None]] = []
        self._guards: list[Callable[[], None]] = []
        self.exposed = False  # zk.shards: the pieces' own .grad is what the user sees and drops
        places = [tenant.place for tenant in self.tenants]
        self._flattening = Flattening([one.offset for one in places], [one.numel for one in places], dtype)
        divided = not self.replicated and not on_device  # whole ones are plain tensors, which anybody may write
        params, here = [tenant.place.param for tenant in self.tenants], self.bucket.pieces(self.group.rank)
        self.squares = BucketSquares(params, here, counted=divided)

    def begin(self, task: int, landed: int | None) -> None:
        """A pass begins: from here on gradients land in empty `.grad`s. `landed`: the place of one that has already."""
        trained, leaves = list(map(_is_trained, self._params)), self.leaves
        alike = self.lands_in_params or trained == list(map(_is_trained, leaves))
        self.inbox.expected, self.inbox.task = sum(trained), task if alike else NO_PASS
        self.running = True
        if not self.lands_in_params:
            self._before = list(map(_grad_of, self._params))
            return
        for place, grad in enumerate(list(map(_grad_of, leaves))):
            if grad is None:
                continue
            if place != landed:
                self._aside[place] = grad
                leaves[place].grad = None
            elif self._landed(place) is None:
                self._aside[place] = grad

    def take_written(self) -> None:
        """Gradients that a custom Function has written into a `.grad` in this pass, of which autograd tells nobody."""
        if not self.running:
            return
        if not self.lands_in_params:
            self._take_written_to_params()
        for place, grad in enumerate(list(map(_grad_of, self.leaves))):
            if grad is None or grad is self._aside.get(place) or (place in self.arrived and not self.closed):
                continue
            if not self.lands_in_params or self._landed(place) is not None:
                self.leaves[place].grad = None
                self.hand_over(place, grad)

    def _take_written_to_params(self) -> None:
        grads = list(map(_grad_of, self._params))
        for place, (grad, before) in enumerate(zip(grads, self._before, strict=True)):
            if grad is not None and grad is not before and not self.shows(place, grad):
                self._params[place].grad = before
                self.hand_over(place, grad)

    def put_back(self) -> None:
        """Shows again what was put aside, in the place of what has landed."""
        for place in self.arrived - self._stored:
            self._take_out(place)
        with without_waiting():
            for place, grad in self._aside.items():
                self.leaves[place].grad = grad
        self._aside.clear()
        self._before = []
        self.running = False

    def land(self, place: int, *, at_once: bool) -> None:
        """A gradient of this pass lies in its leaf's `.grad`, or was added to what is shown there."""
        if not self._counts(place):
            return
        if self.closed or at_once:
            grad = self._take_out(place)
            if grad is not None:
                self.receive_one(place, grad)
            if place in self._aside:
                self.leaves[place].grad = self._aside[place]
        elif self._landed(place) is None:
            self._stored.add(place)  # added to what lies in the buffer and is shown
        if not self.closed:
            self.arrived.add(place)

    def hand_over(self, place: int, grad: Tensor) -> None:
        """A gradient from besides the usual leaf waits for the bucket's end.

        It must not be what completes the bucket: it may have come on this rank alone, and all launch at one time.
        """
        if self._counts(place):
            grad = self._checked(place, grad)
            self._take_late(place, grad) if self.closed else self.beside.append((place, grad.detach()))

    def add(self, place: int, grad: Tensor) -> None:
        """A part of one that arrives later: it lies there as what an earlier pass has left, to be added to."""
        if not self._counts(place):
            return
        grad = self._checked(place, grad)
        if self.closed:
            self._take_late(place, grad)
        else:
            self._write(place, grad)
            self._kept.add(place)

    def store(self, place: int, grad: Tensor) -> None:
        """A whole gradient goes into the buffer before the others."""
        self._write(place, grad)
        self._stored.add(place)

    def receive_one(self, place: int, grad: Tensor) -> None:
        """A whole gradient, which nobody has looked at, goes into the buffer, or to those that are late."""
        grad = self._checked(place, grad)
        self._take_late(place, grad) if self.closed else self.store(place, grad)

    def _counts(self, place: int) -> bool:
        """Whether what arrives there is a gradient: it is dropped if the parameter was frozen since the forward."""
        with without_waiting():
            trained = self._params[place].requires_grad
        if not trained:
            self._drop(place)
        elif place in self._dropped:
            checks.thawed(self.tenants[place].name)
        return trained

    def _checked(self, place: int, grad: Tensor) -> Tensor:
        tenant = self.tenants[place]
        return checks.gradient(tenant.name, grad, tenant.placed)

    def refuse_mixed(self, place: int, *, scaled: bool) -> None:
        """The first gradient of a pass that nobody saw begin went to what is shown, before that could be scaled."""
        grad = self.leaves[place].grad
        if self.replicated and (scaled or self.summing.counts_again) and grad is not None and self.shows(place, grad):
            checks.mixed(self.tenants[place].name)

    def _write(self, place: int, grad: Tensor) -> None:
        there = place in self._kept or place in self._stored
        self._spans[place].add_(grad) if there else self._spans[place].copy_(grad)

    def _landed(self, place: int) -> Tensor | None:
        """The gradient in a leaf's `.grad`; None where that is what is shown to the user, or an addition to it."""
        leaf = self.leaves[place]
        with without_waiting():  # at stage 3 a leaf without memory stands for the parameter
            grad = leaf.grad
        shown = self.lands_in_params and (isinstance(grad, Sharded) or self.shows(place, grad))
        return None if shown else grad

    def _take_out(self, place: int) -> Tensor | None:
        grad = self._landed(place)
        if grad is not None:
            with without_waiting():
                self.leaves[place].grad = None
        return grad

    def _drop(self, place: int) -> None:
        """Frozen since the forward: autograd drops what arrives then, and all that it would have been added to."""
        if place in (self.arrived_places if self.closed else self._kept & self.arrived):
            checks.thawed(self.tenants[place].name)
        self._take_out(place)
        self._dropped.add(place)
        self.inbox.task = NO_PASS
        self.arrived.discard(place)
        self._stored.discard(place)
        self.beside = [one for one in self.beside if one[0] != place]

    def _take_late(self, place: int, grad: Tensor) -> None:
        """The order of the units did not show that more would come."""
        into = self.buffer
        if self.launched:
            self.late_places.add(place)
            into = self.late = self._zeros() if self.late is None else self.late
        else:
            self.local.add(place)
            self.arrived_places += (place,)
        assert into is not None
        into.as_strided(*self._spots[place]).add_(grad)

    def _zeros(self) -> Tensor:
        return self.memory.pool.zeros(self.bucket.padded_numel, self.dtype)

    def kept_gradients(self) -> dict[int, Tensor]:
        """What the user has in `.grad`, by place, whatever lands there now."""
        if self.running and self.lands_in_params and not self.exposed:
            return self._aside
        with without_waiting():
            found = list(map(_grad_of, [home.piece for home in self.homes] if self.exposed else self._params))
        return {place: grad for place, grad in enumerate(found) if grad is not None}

    def _lives(self) -> set[int]:
        """Places where the user kept what `.grad` held, so that it is to be added to."""
        kept = self.kept_gradients()
        for place, grad in list(kept.items()):
            if not self.shows(place, grad):
                self._adopt(place, grad)
        return set(kept)

    def _adopt(self, place: int, grad: Tensor) -> None:
        """A gradient that was set by hand: it counts as reduced already."""
        home = self.homes[place]
        self._show()
        with fetched([grad], written=()):
            span = grad if self.exposed else home.part_of(grad)
            self.reduced_span(place).copy_(span.reshape(-1) if self.replicated else span)
        self.give([place])
        self.held.add(place)

    def shows(self, place: int, grad: Tensor | None) -> bool:
        """Whether this is the gradient that was put where the user looks for it."""
        if not self.shown or grad is None:
            return False
        return shares(grad, self.reduced) if self.exposed else self._own(place) is grad  # type: ignore[arg-type]

    def _own(self, place: int) -> Tensor:
        """What shows a gradient; anew where it was given other memory (`.data =`), which nothing is reduced into."""
        shown, tenant = self.shown[place], self.tenants[place]
        if self.replicated and self.reduced is not None and not shares(local_of(shown), self.reduced):
            self.shown[place] = tenant.show(alias(self.reduced, tenant.place.offset, tenant.shape))
        return self.shown[place]

    def reduced_span(self, place: int) -> Tensor:
        """This rank's part of what is reduced of a parameter, as `.grad` shows it."""
        shown = self.shown[place]
        return shown.span if isinstance(shown, Sharded) else local_of(shown).view(-1)

    def handed_out(self) -> bool:
        """Whether gradients may be written where nobody counts it: plain tensors, and what was taken out of others."""
        return self.exposed or self.replicated or any(map(_handed_out, self._pieces))

    def spare_what_is_kept(self) -> None:
        """A gradient that `.grad` shows no more, but somebody has kept, stays as it is: the next goes elsewhere."""
        self.ready = None
        if self.reduced is None or self._references is None:
            return
        live = {at for at, grad in self.kept_gradients().items() if self.exposed or grad is self.shown[at]}
        views = len(live) if self.exposed and self.replicated else 0
        if self._references.has_more(self.reduced, live, views):
            self._move(live)

    def _move(self, live: set[int], *, out: bool = False) -> None:
        """To other memory, with the values that are still shown; `out` of the buffer, which is about to be written."""
        if self.in_place and not out:
            self._lay(self.buffer.clone())  # type: ignore[union-attr]
            self.reduced = self._room()
        else:
            kept = self.reduced
            self.reduced = kept.clone() if self.landing is None else self._room().copy_(kept)  # type: ignore[arg-type,union-attr]
        self._make_shown()
        self.give(live)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply what is reduced and shown; each gets a version of its own, by which whoever has fetched it sees
        this."""
        if self.held and self.reduced is not None and any(self.shows(*one) for one in self.kept_gradients().items()):
            self._guard()
            self.reduced.mul_(factor)
            torch.autograd.graph.increment_version([self.reduced_span(at) for at in self.held])

    def open(self, buffer: Tensor) -> None:
        """What arrives in this pass goes into `buffer`, beside what passes under no_sync left there."""
        self._guard()
        self._guards.clear()
        self.ready = None
        self._lay(buffer)
        with without_waiting():  # whoever waits for gradients waits for `_guard`
            if self.running and not self.lands_in_params:
                self._take_written_to_params()
            lives = self._lives()
        if self.shown:  # what they show is about to be written
            torch.autograd.graph.increment_version([self.reduced_span(place) for place in lives])
        self.local &= lives
        self.held &= lives
        if self.held and self.in_place and not self.stays:
            self._move(self.held, out=True)
        if self.summing.counts_again:
            self.summing.share_out(self._spans[place] for place in self.held)
            self.held.clear()
        self._kept = lives if self.stays else set(self.local)
        self.adds = not self.stays and bool(self.held)
        self.opened = True

    def _lay(self, buffer: Tensor) -> Tensor:
        """What arrives goes there. The spans are kept, and made before anybody counts who refers to the memory."""
        self.buffer = buffer
        if not self._spans or self._spans[0].untyped_storage()._cdata != buffer.untyped_storage()._cdata:
            self._spans = [buffer.as_strided(*spot) for spot in self._spots]
        return buffer

    def close(self, *, reduces: bool) -> bool:
        """No more is to arrive: zeros where nothing did and nothing was left. Whether to add to `reduced`."""
        assert self.buffer is not None
        with without_waiting():
            self.take_written()
        self.closed, self.inbox.task = True, NO_PASS
        self._collect(self.buffer)
        for place, grad in self.beside:
            self.store(place, grad)
            self.arrived.add(place)
        self.beside.clear()
        for place in self._places - self._stored - self._kept:
            self._spans[place].zero_()
        if self.adds or not reduces:  # zeros where something else is, or where it is to be shown unreduced
            self._show()
            for place in () if self.in_place else self._places - self.held:
                self.reduced_span(place).zero_()
        if not reduces:
            self.local |= self.arrived
        return self.adds

    def _collect(self, buffer: Tensor) -> None:
        """What has landed goes into the buffer, in one call for what is copied and one for what is added."""
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
        """Send the buffer on its way; None where there is nothing to wait for."""
        self.launched = True
        self.local.clear()
        self._show()
        assert self.reduced is not None
        return self.summing.begin(buffer, self.reduced, add=add, scratch=scratch, squares=self.squares.wanted())

    def reduce_late(self, scratch: Tensor | None) -> None:
        """Add what arrived late, on any rank, to what is reduced."""
        late = self._zeros() if self.late is None else self.late
        self._guard()
        assert self.reduced is not None
        self.ready, squares = None, self.squares.wanted()
        (self.summing.begin(late, self.reduced, add=True, scratch=scratch, squares=squares) or Handle()).wait()
        if self.stays:
            self.reduced.add_(late)
        self.tell()

    def _show(self) -> None:
        if self.reduced is None:
            self.reduced = self._room()
            self._make_shown()

    def _room(self) -> Tensor:
        if self.stays:
            return self.whole_buffer()
        numel = self.bucket.shard_numel
        if self.landing is not None:
            return self.landing.room(numel, self.dtype)
        if self.lends_buffer:
            return self.memory.pool.zeros(numel, self.dtype)
        return alias(self.whole_buffer(), self.group.rank * numel, (numel,))

    def whole_buffer(self) -> Tensor:
        """A buffer of this bucket's own, for as long as it is needed."""
        return self._lay(self._zeros()) if self.buffer is None else self.buffer

    def _make_shown(self) -> None:
        assert self.reduced is not None
        self.shown = []
        spans = {piece.param: piece for piece in self.bucket.pieces(self.group.rank)}
        for number, (tenant, home) in enumerate(zip(self.tenants, self.homes, strict=True)):
            if self.replicated:
                self.shown.append(tenant.show(alias(self.reduced, tenant.place.offset, tenant.shape)))
                continue
            piece = spans.get(tenant.place.param)
            local: Any = alias(self.reduced, 0 if piece is None else piece.offset, (home.numel,))
            local.zk_handed_out = False
            named = Sharded.of(local, home.here, name=home.name, kind="gradient")
            named.settle = self.settle
            named.receive = None if self.receive is None else partial(self.receive, number)
            named.whole = partial(whole_like, self.group, self.bucket.shard_numel, tenant.place, tenant.placed)
            self.shown.append(named)
            del named, local
        self._pieces = [] if self.replicated else [one.span for one in self.shown if isinstance(one, Sharded)]
        self._references = References(self.reduced, self.shown)

    def tell(self) -> None:
        """What is reduced is there: for the caller, or, on a device, for its current stream."""
        assert self.reduced is not None
        pieces = list(map(self.reduced_span, range(len(self.shown)))) if self.replicated else self._pieces
        sums = [None] * len(pieces) if self.exposed else self.squares.found(pieces, everything=self.leaves_memory)
        self.ready = GradReady(pieces, list(map(_version_of, pieces)), sums)
        for listener in self.listeners:
            listener(self.ready)

    def reads_until(self, wait: Callable[[], None]) -> None:
        """Something reads what is reduced: whoever writes it calls `wait` first."""
        self._guards.append(wait)
        if self.settle is None:
            for shown in self.shown:
                if isinstance(shown, Sharded):
                    shown.settle = weakly(self._guard)  # what is shown must not keep the bucket that shows it

    def _guard(self) -> None:
        for wait in self._guards:
            wait()

    def settles(self, settle: Callable[[], None]) -> None:
        """From now on updates may be under way: who does anything with a gradient that is shown waits for them."""
        self.settle = settle
        for shown in self.shown:
            if isinstance(shown, Sharded):
                shown.settle = settle

    def give(self, places: Iterable[int]) -> None:
        """Put the gradients where the user looks for them."""
        self._show()
        aside = self._aside if self.running and self.lands_in_params else None
        for place in places:
            if self.exposed:
                home = self.homes[place]
                home.piece.grad = SpanGradient.of(self.reduced_span(place), home.name, home.here.group)
                continue
            shown = self._own(place) if self.replicated else self.shown[place]
            if aside is None:
                self._params[place].grad = shown
            else:
                aside[place] = shown

    def call_hooks(self, places: Iterable[int]) -> None:
        """Hooks on the accumulation of these gradients, which are reduced, in the order of the model's parameters."""
        some = [place for place in places if self.homes[place].has_hooks] if any(self._user_hooks) else []
        for place in sorted(some, key=lambda place: self.bucket.places[place].param):
            self.homes[place].call_hooks(self.homes[place].piece if self.exposed else self.tenants[place].param)

    def refuse_unreduced(self) -> None:
        """A step on gradients that other ranks know nothing of would let the ranks drift apart."""
        apart = not self.replicated or self.summing.counts_again  # as in DDP, means at stage 0 are each rank's affair
        if self.local and apart and self.summing.needed:
            checks.unreduced([self.tenants[place].name for place in sorted(self.local)])

    def reset(self) -> None:
        """Forget a pass, or be ready for the next one."""
        self.put_back()
        self.arrived.clear()
        self._stored.clear()
        self.inbox.task = NO_PASS
        self.beside.clear()
        self.absent.clear()
        self._dropped.clear()
        self.launched = self.opened = self.closed = False
        self.late, self.late_places, self.arrived_places = None, set(), ()
        if self.lends_buffer and not self.local and self.buffer is not None:
            self.buffer, self._spans = None, []
