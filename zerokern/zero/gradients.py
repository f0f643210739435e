"""The gradients of one bucket: from autograd's tensors into a buffer in one pass, from there into this rank's shard.

What gradients are added to is decided by what the user left in `.grad`: None begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from zerokern.comm import Handle
from zerokern.zero import checks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.fetching import fetched
from zerokern.zero.flattening import Flattening
from zerokern.zero.homes import Home, alias, strides
from zerokern.zero.hooks import hooks_after_accumulation, weakly
from zerokern.zero.kinds import local_of
from zerokern.zero.landing import IntoHost
from zerokern.zero.params import BucketMemory, Tenant, whole_like
from zerokern.zero.partition import shards_gradients, shards_state
from zerokern.zero.references import References, shares
from zerokern.zero.sharded import Sharded
from zerokern.zero.span_gradients import SpanGradient
from zerokern.zero.squares import BucketSquares
from zerokern.zero.summing import Summing

__all__ = ["GradientBucket"]

_grad_of = attrgetter("grad")


class GradientBucket:
    """What arrived of a bucket's gradients, where they are gathered up (`buffer`) and where they end (`reduced`)."""

    def __init__(
        self, number: int, memory: BucketMemory, homes: list[Home], stage: int, dtype: torch.dtype, losses: int | None
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
        # on a device one launch flattens all; on a CPU each goes at once: its memory, and the cache, serve the next
        self.keeps = memory.device.type != "cpu"
        self.opened = self.closed = self.launched = self.adds = False
        self._kept: set[int] = set()
        self.absent: set[int] = set()  # places that nothing will arrive at in this pass
        self._dropped: set[int] = set()  # places whose gradients of this pass came when they were frozen
        self.arrived: dict[int, Tensor | None] = {}
        self.arrived_places: tuple[int, ...] = ()
        self.beside: list[tuple[int, Tensor]] = []  # from leaves besides the one that modules compute with
        self.late: Tensor | None = None  # what arrived after the buffer had been sent: reduced at the end of the pass
        self.late_places: set[int] = set()
        self.local: set[int] = set()  # places with gradients of passes under no_sync
        self.held: set[int] = set()  # places whose reduced span holds a reduced gradient
        self.buffer: Tensor | None = None
        self.reduced: Tensor | None = None
        self.shown: list[Tensor] = []
        self._references: References | None = None
        # where each lies in a buffer, which begins its storage
        self._spots = [(tenant.shape, strides(tenant.shape), tenant.place.offset) for tenant in self.tenants]
        self._spans: list[Tensor] = []  # of the buffer, by place
        self._places = frozenset(range(len(self.tenants)))
        self.expected = len(self.tenants)  # with so many, every parameter that wanted a gradient has one
        self.settle: Callable[[], None] | None = None  # returns once no update reads what is shown
        self.listeners: list[Callable[[], None]] = []  # are told whenever a pass has reduced this bucket
        self._guards: list[Callable[[], None]] = []
        self.exposed = False  # zk.shards: the pieces' own .grad is what the user sees and drops
        self._flattening = Flattening([tenant.place.offset for tenant in self.tenants], dtype)
        divided = not self.replicated and not self.keeps  # whole ones are plain tensors, which anybody may write
        params, here = [tenant.place.param for tenant in self.tenants], self.bucket.pieces(self.group.rank)
        self.squares = BucketSquares(params, here, counted=divided)

    def begin(self) -> None:
        """A pass begins."""
        self.expected = sum(tenant.param.requires_grad for tenant in self.tenants)
        for found, home in zip(self._finders(), self.homes, strict=True):
            meets = home.leaf is None or home.loan is not None or self.exposed
            if meets and hooks_after_accumulation(found) is not None:
                home.adopt_hooks(found)

    def take(self, place: int, grad: Tensor, beside: bool) -> None:
        """A gradient of this pass, as autograd made it; one from `beside` the usual leaf waits for the bucket's end.

        It must not be what completes the bucket: it may have come on this rank alone, and all launch at one time.
        """
        tenant = self.tenants[place]
        if not tenant.param.requires_grad:
            self._drop(place)
            return
        grad = checks.gradient(tenant.name, grad, tenant.placed)
        if place in self._dropped:
            checks.thawed(self.tenants[place].name)
        if self.closed:
            self._take_late(place, grad)
        elif beside:
            self.beside.append((place, grad.detach()))
        else:
            self._put(place, grad)

    def add(self, place: int, grad: Tensor) -> None:
        """A part of one that arrives later: it lies there as what an earlier pass has left, to be added to."""
        if self.closed or not self.tenants[place].param.requires_grad:
            self.take(place, grad, beside=False)
            return
        grad = checks.gradient(self.tenants[place].name, grad, self.tenants[place].placed)
        there = place in self._kept or (place in self.arrived and not self.keeps)
        self._spans[place].add_(grad) if there else self._spans[place].copy_(grad)
        self._kept.add(place)

    def _put(self, place: int, grad: Tensor) -> None:
        """What was in order when it arrived; what has become of the parameter since does not matter."""
        if self.keeps:
            grad = grad.resolve_neg()
            before = self.arrived.get(place)
            self.arrived[place] = grad.detach() if before is None else before + grad
        else:
            if place in self._kept or place in self.arrived:
                self._spans[place].add_(grad)
            else:
                self._spans[place].copy_(grad)
            self.arrived[place] = None

    def _drop(self, place: int) -> None:
        """Frozen since the forward: autograd drops what arrives then, and all that it would have been added to."""
        if place in (self.arrived_places if self.closed else self._kept & self.arrived.keys()):
            checks.thawed(self.tenants[place].name)
        self._dropped.add(place)
        self.arrived.pop(place, None)
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

    def live(self, place: int) -> bool:
        """Whether the user kept what `.grad` held, so that it is to be added to."""
        if self.exposed:
            return self.homes[place].piece.grad is not None
        grad = self.tenants[place].param.grad
        if grad is not None and not self.shows(place, grad):
            self._adopt(place, grad)
        return grad is not None

    def _adopt(self, place: int, grad: Tensor) -> None:
        """A gradient that was set by hand: it counts as reduced already."""
        home, param = self.homes[place], self.tenants[place].param
        self._show()
        with fetched([param.grad], written=()):
            span: Tensor = home.local_gradient(param)  # type: ignore[assignment]
            self.reduced_span(place).copy_(span.reshape(-1) if self.replicated else span)
        param.grad = self.shown[place]
        self.held.add(place)

    def shows(self, place: int, grad: Tensor) -> bool:
        """Whether this is the gradient that was put where the user looks for it."""
        return bool(self.shown) and self._own(place) is grad

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

    def _reduced_spans(self) -> list[Tensor]:
        return [self.reduced_span(place) for place in range(len(self.shown))]

    def _finders(self) -> list[Tensor]:
        """Where the user looks for gradients, by place."""
        return [home.piece for home in self.homes] if self.exposed else [tenant.param for tenant in self.tenants]

    def handed_out(self) -> bool:
        """Whether gradients may be written where nobody counts it: plain tensors, and what was taken out of others."""
        return self.exposed or any(not isinstance(one, Sharded) or one.handed_out for one in self.shown)

    def spare_what_is_kept(self) -> None:
        """A gradient that `.grad` shows no more, but somebody has kept, stays as it is: the next goes elsewhere."""
        if self.reduced is None or self._references is None:
            return
        with without_waiting():
            seen = list(map(_grad_of, self._finders()))
        live = {i for i, grad in enumerate(seen) if grad is not None and (self.exposed or grad is self.shown[i])}
        dropped = [shown for place, shown in enumerate(self.shown) if place not in live] if live else list(self.shown)
        views = len(live) if self.exposed and self.replicated else 0
        if self._references.has_more(self.reduced, dropped, views):
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
        """Multiply what is reduced; each gets a version of its own, by which whoever has fetched it sees this."""
        if self.held and self.reduced is not None:
            self.reduced.mul_(factor)
            torch.autograd.graph.increment_version([self.reduced_span(at) for at in self.held])

    def open(self, buffer: Tensor) -> None:
        """What arrives in this pass goes into `buffer`, beside what passes under no_sync left there."""
        self._guard()
        self._guards.clear()
        self.squares.forget(self._reduced_spans())
        self._lay(buffer)
        with without_waiting():  # whoever waits for gradients waits for `_guard`
            found = map(_grad_of, self._finders())
            lives = {place for place, grad in enumerate(found) if grad is not None and self.live(place)}
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
        for place, grad in self.beside:
            self._put(place, grad)
        self.beside.clear()
        self.closed = True
        waiting = {place: grad for place, grad in self.arrived.items() if grad is not None}
        self._flattening.run({at: grad for at, grad in waiting.items() if at not in self._kept}, self.buffer)
        for place in waiting.keys() & self._kept:
            self._spans[place].add_(waiting[place])
        for place in self._places - self.arrived.keys() - self._kept:
            self._spans[place].zero_()
        if self.adds or not reduces:  # zeros where something else is, or where it is to be shown unreduced
            self._show()
            for place in () if self.in_place else self._places - self.held:
                self.reduced_span(place).zero_()
        if not reduces:
            self.local |= set(self.arrived)
        return self.adds

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
        self.squares.forget(self._reduced_spans())
        squares = self.squares.wanted()
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
        for tenant, home in zip(self.tenants, self.homes, strict=True):
            if self.replicated:
                self.shown.append(tenant.show(alias(self.reduced, tenant.place.offset, tenant.shape)))
                continue
            piece = spans.get(tenant.place.param)
            local = alias(self.reduced, 0 if piece is None else piece.offset, (home.numel,))
            named = Sharded.of(local, home.here, name=home.name, kind="gradient")
            named.settle = self.settle
            named.whole = partial(whole_like, self.group, self.bucket.shard_numel, tenant.place, tenant.placed)
            self.shown.append(named)
            del named, local
        self._references = References(self.reduced, list(self.shown))

    def tell(self) -> None:
        """What is reduced is there: for the caller, or, on a device, for its current stream."""
        if not self.exposed:
            self.squares.note(self._reduced_spans())
        for listener in self.listeners:
            listener()

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
        for place in places:
            if self.exposed:
                home = self.homes[place]
                home.piece.grad = SpanGradient.of(self.reduced_span(place), home.name, home.here.group)
            else:
                self.tenants[place].param.grad = self._own(place) if self.replicated else self.shown[place]

    def call_hooks(self, places: Iterable[int]) -> None:
        """Hooks on the accumulation of these gradients, which are reduced, in the order of the model's parameters."""
        for place in sorted(places, key=lambda place: self.bucket.places[place].param):
            self.homes[place].call_hooks(self.homes[place].piece if self.exposed else self.tenants[place].param)

    def refuse_unreduced(self) -> None:
        """A step on gradients that other ranks know nothing of would let the ranks drift apart."""
        apart = not self.replicated or self.summing.counts_again  # as in DDP, means at stage 0 are each rank's affair
        if self.local and apart and self.summing.needed:
            checks.unreduced([self.tenants[place].name for place in sorted(self.local)])

    def reset(self) -> None:
        """Forget a pass, or be ready for the next one."""
        self.arrived.clear()
        self.beside.clear()
        self.absent.clear()
        self._dropped.clear()
        self.launched = self.opened = self.closed = False
        self.late, self.late_places, self.arrived_places = None, set(), ()
        if self.lends_buffer and not self.local and self.buffer is not None:
            self.buffer, self._spans = None, []
