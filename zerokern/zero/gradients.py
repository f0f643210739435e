"""Collects the gradients of one bucket in a buffer, and reduces them; `.grad` then shows this rank's part of them.

Gradients are added to what the user left in `.grad`; None begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for as contiguous_strides

from zerokern.comm import Group, Handle
from zerokern.memory.interrupts import whole
from zerokern.zero import checks
from zerokern.zero.hooks import NO_PASS, Arrivals
from zerokern.zero.kinds import without_waiting
from zerokern.zero.params import BucketEntry, BucketMemory
from zerokern.zero.partition import shards_gradients, shards_state
from zerokern.zero.reducing import Flattening, Reducer
from zerokern.zero.shard import Shard, alias
from zerokern.zero.sharded import Sharded, SpanGradient
from zerokern.zero.shown import Fetch, ShownGradients, shares
from zerokern.zero.tiers import fetched

__all__ = ["GradientBucket", "Inbox"]

_grad_of = attrgetter("grad")
# what a pass has done with a bucket
WAITING, OPEN, CLOSED, LAUNCHED = range(4)


class Inbox:
    """The gradients of one bucket that have arrived in `.grad` of its `leaves`, by place, in a backward pass.

    `before`: what `.grad` of parameters held when the pass that is running began; leaves are emptied meanwhile. Hooks
    note gradients of the pass with the number `task` as `arrived`; with NO_PASS each is looked at. `expected`: how many
    complete the bucket.
    """

    def __init__(
        self, memory: BucketMemory, dtype: torch.dtype, shown: ShownGradients, *, lands_in_params: bool
    ) -> None:
        """`lands_in_params`: the parameters are the leaves; at stage 3 others are."""
        self._entries, self._shown = (entries := memory.entries), shown
        self.leaves: list[Tensor] = [one.leaf for one in entries]
        self.params: list[Tensor] = [one.param for one in entries]
        self.lands_in_params = lands_in_params
        # On a device one launch flattens all. On a CPU one call does where all are small; else each goes at once: its
        # memory and the cache serve the next, and small ones that waited between large ones would fragment the heap.
        together = memory.bucket.arrives_at_once(dtype.itemsize, memory.device.type)
        self.waits = [together and one.placed is None for one in entries]
        places, waiting = [one.place for one in entries], [place for place, waits in enumerate(self.waits) if waits]
        self._waiting = set(waiting)
        self._flattening = Flattening(places, dtype, {place: self.leaves[place] for place in waiting})
        self.arrivals = Arrivals()  # hooks keep this alone
        self.arrived = self.arrivals.arrived
        self.absent: set[int] = set()  # places that nothing will arrive at in this pass
        self._dropped: set[int] = set()  # places whose gradients of this pass came when they were frozen
        self.from_other_leaves: list[tuple[int, Tensor]] = []  # besides the one that modules compute with
        self.running = False
        self.before: dict[int, Tensor] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more gradients are expected in this pass."""
        return self.arrivals.expected <= len(self.arrived | self.absent if self.absent else self.arrived)

    def begin(self, task: int, expected: int, arrived: int | None, *, shows_none: bool) -> None:
        """Begins a pass, in which so many gradients are expected: empties `.grad`, where gradients arrive.

        `arrived`: the place of one that has come already. `shows_none`: no parameter shows a gradient.
        """
        self.arrivals.expected, self.arrivals.task = expected, task
        params = () if shows_none else self.params
        self.before = {place: grad for place, grad in enumerate(map(_grad_of, params)) if grad is not None}
        if self.lands_in_params and arrived is not None and not self.shows_in_leaf(arrived):
            self.before.pop(arrived, None)
        self.running = True  # before `.grad` is emptied: who breaks off puts it back
        for place in self.before.keys() - {arrived} if self.lands_in_params else ():
            self.leaves[place].grad = None

    def show(self, place: int, grad: Tensor) -> None:
        """Shows a gradient in `.grad`, or, while a pass runs, has it put there when that ends."""
        param, then = self.params[place], self.before.get(place)
        if self.running:
            self.before[place] = grad
        # what came in this pass is another one, which is yet to be taken
        if not self.running or (not self.lands_in_params and param.grad is then):
            param.grad = grad

    def put_back(self) -> None:
        """Puts back into `.grad` what was there before the pass."""
        with without_waiting():
            for place, grad in self.before.items():
                self.params[place].grad = grad
        self.running = False  # before it is forgotten: a pass may break off until then
        self.before = {}

    def break_off(self) -> None:
        """Drops what a pass that ended early has left in leaves, noted or not, and puts back what was there before."""
        if self.running:
            with without_waiting():
                for leaf in self.leaves:
                    leaf.grad = None
            self.put_back()

    def reset(self) -> None:
        """Ends a pass, whether it finished or not."""
        self.break_off()
        for noted in (self.arrived, self.absent, self._dropped, self.from_other_leaves):
            noted.clear()
        self.arrivals.task = NO_PASS

    def kept(self) -> dict[int, Tensor]:
        """Returns what the program has in `.grad`, by place, whatever arrives there now."""
        exposed = self._shown.exposed
        if self.running and not exposed:  # what is there now was written in this pass
            return self.before
        with without_waiting():
            found = list(map(_grad_of, [shard.piece for shard in self._shown.shards] if exposed else self.params))
        return {place: grad for place, grad in enumerate(found) if grad is not None}

    def shows_in_leaf(self, place: int) -> bool:
        """Whether the gradient in a leaf's `.grad` is the one shown to the user."""
        grad = self.leaves[place].grad if self.lands_in_params else None
        return isinstance(grad, Sharded) or self._shown.shows(place, grad)

    def is_trained(self, place: int) -> bool:
        """Whether the parameter is trained; refuses one that was thawed within the pass."""
        with without_waiting():
            trained = self.params[place].requires_grad
        if trained and place in self._dropped:
            checks.thawed(self._entries[place].name)
        return trained

    def drop(self, place: int, *, added: bool) -> None:
        """Drops the gradient of a parameter that was frozen since the forward, as autograd does.

        `added`: a part of it has been added to others.
        """
        if added and place in self.arrived:
            checks.thawed(self._entries[place].name)
        if not self.shows_in_leaf(place):
            self.take_out(place)
        self._dropped.add(place)
        self.arrivals.task = NO_PASS
        self.arrived.discard(place)
        self.from_other_leaves = [one for one in self.from_other_leaves if one[0] != place]

    def take_out(self, place: int) -> Tensor | None:
        """Takes a gradient out of a leaf."""
        with without_waiting():  # at stage 3 a leaf without memory stands for the parameter
            grad, self.leaves[place].grad = self.leaves[place].grad, None
        return grad

    def take_written(self, *, closed: bool) -> list[tuple[int, Tensor]]:
        """Takes gradients that a custom Function wrote into a `.grad` in this pass: no hook is called for them.

        `closed`: also where others have arrived.
        """
        if not self.running:
            return []
        found: list[tuple[int, Tensor]] = []
        if not self.lands_in_params:
            for place, grad in enumerate(list(map(_grad_of, self.params))):
                if grad is None or grad is (before := self.before.get(place)) or self._shown.shows(place, grad):
                    continue
                self.params[place].grad = before
                found.append((place, grad))
        if not closed and len(self.arrived) == len(self.leaves):
            return found
        for place, grad in enumerate(list(map(_grad_of, self.leaves))):
            if grad is None or grad is self.before.get(place) or (place in self.arrived and not closed):
                continue
            if not self.shows_in_leaf(place):
                self.leaves[place].grad = None
                found.append((place, grad))
        return found

    def checked(self, place: int, grad: Tensor) -> Tensor:
        """Returns the local part of a gradient; refuses one that cannot be reduced."""
        entry = self._entries[place]
        return checks.gradient(entry.name, grad, entry.placed)

    def collect(self, buffer: Tensor, stored: set[int], kept: AbstractSet[int]) -> None:
        """Moves what has arrived into the buffer, in one call for what is copied and one for what is added.

        `stored`: the places of what is there already, and then of all. `kept`: of what is added to.
        """
        places = self.arrived - stored
        with without_waiting():
            as_usual = places == self._waiting and not places & kept and not torch.is_grad_enabled()
            if as_usual and self._flattening.of_all(buffer):  # which looks at them, too
                for leaf in self._flattening.leaves:
                    leaf.grad = None
                stored.update(places)
                return
            grads = {place: grad for place in sorted(places) if (grad := self.leaves[place].grad) is not None}
            for place in grads:
                self.leaves[place].grad = None
        for place, grad in grads.items():
            grads[place] = self.checked(place, grad)
        stored.update(grads)
        self.arrived &= stored
        more = {place: grads.pop(place) for place in list(grads) if place in kept}
        self._flattening.run(more, buffer, add=True)
        self._flattening.run(grads, buffer)


class GradientBucket:
    """One bucket's gradients: the `inbox` where they arrive, the `buffer` they are collected in, how they are reduced,
    and what is `shown` of the result."""

    leaves_memory = False  # whether what is reduced goes elsewhere until it is used

    def __init__(
        self, number: int, memory: BucketMemory, shards: list[Shard], stage: int, dtype: torch.dtype, losses: int | None
    ) -> None:
        self.number, self.memory, self.shards, self.dtype = number, memory, shards, dtype
        self.replicated = not shards_state(stage)
        # one rank's shard is the bucket: the gradients are flattened where they stay, unless that is in host memory
        self.stays = self.replicated or (memory.group.alone and memory.host is None)
        self.lends_buffer = shards_gradients(stage) and not self.stays
        # whole gradients are plain tensors, which anybody may write; a device measures its own when it makes a step
        measures = not self.replicated and (memory.device.type == "cpu" or memory.host is not None)
        self.reducer = Reducer(
            memory.bucket, memory.group, losses, whole=self.stays, measures=measures, host=memory.host
        )
        self.shown = ShownGradients(memory, shards, self.reducer, replicated=self.replicated)
        self.inbox = Inbox(memory, dtype, self.shown, lands_in_params=stage < 3)
        self.phase = WAITING
        self.local: set[int] = set()  # places with gradients of passes under no_sync
        self._kept: set[int] = set()  # places that this pass adds to in the buffer
        self._stored: set[int] = set()  # places written in this pass; close() zeroes those that nobody has written
        self.buffer: Tensor | None = None
        self._spans: list[Tensor] = []  # of a buffer that stays, by place
        # where each lies in a buffer, which begins its storage
        self._spots = [(one.shape, contiguous_strides(one.shape), one.place.offset) for one in memory.entries]
        self._places = frozenset(range(len(memory.entries)))
        self.after_launch: Tensor | None = None  # what came after the buffer was sent: reduced at the end of the pass
        self.places_after_launch: set[int] = set()
        self._user_hooks = [hooks for shard in shards for hooks in shard.hooks]

    @property
    def group(self) -> Group:
        return self.memory.group

    @property
    def entries(self) -> list[BucketEntry]:
        return self.memory.entries

    @property
    def nbytes(self) -> int:
        return self.memory.bucket.padded_numel * self.dtype.itemsize

    @property
    def called(self) -> str:
        return f"gradients from {self.memory.called} on"

    @property
    def adds(self) -> bool:
        """Whether the pass that runs adds to what is reduced, and not in the buffer."""
        return not self.stays and bool(self.shown.held)

    def take_arrived(self, place: int, *, at_once: bool) -> None:
        """Takes what autograd has left in a leaf's `.grad`, or added to what is shown there, if there is anything."""
        inbox = self.inbox
        if not self._counts(place):
            return
        if inbox.shows_in_leaf(place):
            if self.replicated:  # added there, in the buffer itself
                self._stored.add(place)
            if place not in self._stored:  # a backward function gave it None: autograd calls hooks all the same
                return
        elif self.phase >= CLOSED or at_once:
            grad = inbox.take_out(place)
            if grad is not None:
                self.receive_one(place, grad)
            if inbox.lands_in_params and place in inbox.before:
                inbox.leaves[place].grad = inbox.before[place]
        if self.phase < CLOSED:
            inbox.arrived.add(place)

    def take_from_other_leaf(self, place: int, grad: Tensor) -> None:
        """Keeps a gradient of another leaf until the bucket is closed.

        It must not be what completes the bucket: it may have come on this rank alone, and all launch at one time.
        """
        if self._counts(place):
            grad = self.inbox.checked(place, grad).detach()
            if self.phase >= CLOSED:
                self._take_after_launch(place, grad)
            else:
                self.inbox.from_other_leaves.append((place, grad))

    def take_written(self) -> None:
        """Takes gradients that a custom Function wrote into a `.grad` in this pass: no hook is called for them."""
        for place, grad in self.inbox.take_written(closed=self.phase >= CLOSED):
            self.take_from_other_leaf(place, grad)

    def add(self, place: int, grad: Tensor) -> None:
        """Adds a part of a gradient; the rest arrives later and is added to it."""
        if self._counts(place):
            self._receive(place, grad, self._kept)

    def receive_one(self, place: int, grad: Tensor) -> None:
        """Checks a whole gradient and copies it into the buffer, or adds it to those reduced at the end."""
        self._receive(place, grad, self._stored)

    def _receive(self, place: int, grad: Tensor, noted: set[int]) -> None:
        grad = self.inbox.checked(place, grad)
        if self.phase >= CLOSED:
            self._take_after_launch(place, grad)
        else:
            self._write(place, grad, noted)

    def _counts(self, place: int) -> bool:
        """Returns whether the parameter is trained; what arrives after it was frozen is dropped."""
        if self.inbox.is_trained(place):
            return True
        self.inbox.drop(place, added=self.phase >= CLOSED or place in self._kept)
        self._stored.discard(place)
        return False

    def _write(self, place: int, grad: Tensor, noted: set[int]) -> None:
        there = place in self._kept or place in self._stored
        self._span(place).add_(grad) if there else self._span(place).copy_(grad)
        noted.add(place)

    def _take_after_launch(self, place: int, grad: Tensor) -> None:
        """Adds a gradient that arrived after the bucket was closed."""
        into = self.buffer
        if self.phase == LAUNCHED:
            self.places_after_launch.add(place)
            into = self.after_launch = self._zeros() if self.after_launch is None else self.after_launch
        else:
            self.local.add(place)
            self.inbox.arrived.add(place)
        assert into is not None
        into.as_strided(*self._spots[place]).add_(grad)

    def _zeros(self) -> Tensor:
        return self.memory.pool.zeros(self.memory.bucket.padded_numel, self.dtype)

    def _adopt(self, place: int, grad: Tensor) -> None:
        """Takes a gradient that was set by hand; it counts as reduced already."""
        shown, shard = self.shown, self.shards[place]
        self._show()
        shown.land()
        with fetched([grad], written=()):
            span = grad if shown.exposed else shard.part_of(grad)
            shown.span(place).copy_(span.reshape(-1) if self.replicated else span)
        self.give([place])
        shown.held.add(place)

    def spare_kept_gradients(self) -> None:
        """Moves to other memory if the program has kept a gradient that `.grad` shows no more (gradient surgery)."""
        shown = self.shown
        shown.ready = None
        if not shown.tensors:
            return
        live = {at for at, grad in self.inbox.kept().items() if shown.exposed or grad is shown.tensors[at]}
        if shown.has_kept(live):
            with whole("gradients that the program has kept"):
                self._move(live)

    def _move(self, live: set[int], *, out: bool = False) -> None:
        """Moves what is reduced to other memory, with what is shown of it; `out` of the buffer, if it lies there."""
        shown, kept = self.shown, self.shown.reduced
        assert kept is not None
        shown.released.restore(shown)
        shown.tensors = []
        if self.in_place and not out:
            self._lay(self.buffer.clone())  # type: ignore[union-attr]
            reduced = self._room()
        else:
            shown.land()
            reduced = kept.clone() if self.memory.host is None else self._room().copy_(kept)
        shown.make(reduced)
        self.give(live)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what is reduced and shown, and counts that as a write to each."""
        shown = self.shown
        if shown.held and shown.reduced is not None and any(shown.shows(*one) for one in self.inbox.kept().items()):
            shown.wait()
            shown.reduced.mul_(factor)
            torch.autograd.graph.increment_version([shown.span(at) for at in shown.held])

    def open(self, buffer: Tensor) -> None:
        """Collects this pass in `buffer`, added to what passes under no_sync left there."""
        shown, inbox = self.shown, self.inbox
        was_read = shown.end_reads()
        shown.ready = None
        shown.released.begin()
        if shown.released.is_released:
            shown.released.restore(shown, fetch=bool(inbox.kept()))
        self._lay(buffer)
        with without_waiting():  # whoever waits for gradients waits for `guard`
            kept = dict(inbox.kept())
            for place, grad in kept.items():  # it is added to
                if not shown.shows(place, grad):
                    self._adopt(place, grad)
        lives = set(kept)
        if shown.tensors:  # what they show is about to be written
            torch.autograd.graph.increment_version([shown.span(place) for place in lives])
        shown.keeps = bool(lives) if was_read else shown.keeps
        self.local &= lives
        shown.held &= lives
        if shown.held and self.in_place and not self.stays:
            with whole("gradients that are added to"):
                self._move(shown.held, out=True)
        if self.reducer.counts_again:
            self.reducer.share_out(map(self._span, shown.held))
            shown.held.clear()
        self._kept = lives if self.stays else set(self.local)
        self.phase = OPEN

    def _lay(self, buffer: Tensor) -> Tensor:
        """Sets the buffer. Spans of one that stays are cached, and made before references to the memory are counted."""
        self.buffer = buffer
        if self.lends_buffer:  # each pass has another one, and most need no span of it
            return buffer
        if not self._spans or self._spans[0].untyped_storage()._cdata != buffer.untyped_storage()._cdata:
            self._spans = [buffer.as_strided(*spot) for spot in self._spots]
        return buffer

    def _span(self, place: int) -> Tensor:
        """Returns the elements of a parameter in the buffer."""
        if self._spans:
            return self._spans[place]
        assert self.buffer is not None
        return self.buffer.as_strided(*self._spots[place])

    def close(self, *, reduces: bool) -> None:
        """Completes the buffer, with zeros where nothing arrived."""
        inbox, shown = self.inbox, self.shown
        assert self.buffer is not None
        with without_waiting():
            self.take_written()
        self.phase, inbox.arrivals.task = CLOSED, NO_PASS
        inbox.collect(self.buffer, self._stored, self._kept)
        for place, grad in inbox.from_other_leaves:
            self._write(place, grad, self._stored)
            inbox.arrived.add(place)
        inbox.from_other_leaves.clear()
        if len(self._stored) < len(self._places):
            for place in self._places - self._stored - self._kept:
                self._span(place).zero_()
        if self.adds or not reduces:  # zeros where something else is, or where it is to be shown unreduced
            self._show()
            if new := set() if self.in_place else self._places - shown.held:
                shown.land()
            for place in new:
                shown.span(place).zero_()
        if not reduces:
            self.local |= inbox.arrived
        inbox.arrived |= self.local  # what only passes under no_sync brought is reduced with this one

    @property
    def in_place(self) -> bool:
        """Whether the reduced shard lies in the buffer."""
        reduced = self.shown.reduced
        return reduced is not None and self.buffer is not None and shares(reduced, self.buffer)

    def reduce(self, buffer: Tensor, scratch: Tensor | None) -> Handle | None:
        """Launches the reduction; returns None where there is nothing to wait for."""
        adds, self.phase = self.adds, LAUNCHED
        self.local.clear()
        return self.reducer.begin(buffer, self._show(), add=adds, scratch=scratch)

    def reduce_after_launch(self, scratch: Tensor | None) -> None:
        """Adds what arrived after the launch, on any rank, to what is reduced."""
        unsent, shown = self._zeros() if self.after_launch is None else self.after_launch, self.shown
        shown.guard()
        shown.released.restore(shown)
        assert shown.reduced is not None
        shown.ready = None
        (self.reducer.begin(unsent, shown.reduced, add=True, scratch=scratch) or Handle()).wait()
        if self.stays:
            shown.reduced.add_(unsent)
        self.tell()

    def _show(self) -> Tensor:
        """Returns the memory of what is reduced, which is shown from now on."""
        if not self.shown.tensors:
            self.shown.make(self._room() if self.shown.reduced is None else self.shown.reduced)
        assert self.shown.reduced is not None
        return self.shown.reduced

    def _room(self) -> Tensor:
        numel = self.memory.bucket.shard_numel
        if self.stays:
            return self.whole_buffer()
        if (room := self.reducer.room(numel, self.dtype)) is not None:
            return room
        if self.lends_buffer:
            return self.memory.pool.zeros(numel, self.dtype)
        return alias(self.whole_buffer(), self.group.rank * numel, (numel,))

    def whole_buffer(self) -> Tensor:
        """Returns a buffer of this bucket's own."""
        return self._lay(self._zeros()) if self.buffer is None else self.buffer

    def tell(self) -> None:
        """Tells listeners that what is reduced is there, on a device for the current stream."""
        if self.leaves_memory:
            self.shown.land()
        pieces = self.shown.spans()
        ready = self.shown.make_ready(pieces, self.reducer.sums(pieces, everything=self.leaves_memory))
        for listener in self.shown.listeners:
            listener(ready)

    def give(self, places: Iterable[int]) -> None:
        """Shows the gradients in `.grad`."""
        self._show()
        inbox, shown = self.inbox, self.shown
        if not (shown.exposed or shown.replicated or inbox.running):
            for place in places:
                inbox.params[place].grad = shown.tensors[place]
            return
        for place in places:
            if shown.exposed:
                shard = self.shards[place]
                shard.piece.grad = SpanGradient.of(shown.span(place), shard.name, shard.here.group)
            else:
                inbox.show(place, shown.tensor(place))

    def release(self, fetch: Fetch, *, more: int = 0) -> bool:
        """Gives back the memory of what is reduced, as `ReleasedMemory.release`; returns whether it did.

        It stays while it is in use: for a pass, by who uses gradients after each, or where it was handed out.
        """
        shown, released = self.shown, self.shown.released
        in_use = released.stays or released.used or self.local or self.phase in (OPEN, CLOSED)
        if in_use or not shown.tensors or shown.handed_out():
            return False
        return released.release(shown, fetch, more=more)

    def bring_back(self) -> None:
        """Has memory again that was given back, if a parameter shows any of it."""
        if self.inbox.kept():
            self.shown.released.restore(self.shown)
        else:
            self.shown.released.forget()

    def call_hooks(self, places: Iterable[int]) -> None:
        """Calls users' hooks on the accumulation of these gradients, in the order of the model's parameters."""
        some = [place for place in places if self.shards[place].has_hooks] if any(self._user_hooks) else []
        for place in sorted(some, key=lambda place: self.memory.bucket.places[place].param):
            self.shards[place].call_hooks(self.owner(place))

    def owner(self, place: int) -> Tensor:
        """Returns the tensor whose `.grad` the user reads."""
        return self.shards[place].piece if self.shown.exposed else self.inbox.params[place]

    def refuse_unreduced(self) -> None:
        """Refuses a step on gradients of passes under no_sync alone."""
        checks.unreduced(self)

    def reset(self) -> None:
        """Ends a pass, whether it finished or not."""
        self.inbox.reset()
        self._stored.clear()
        self.phase = WAITING
        self.after_launch, self.places_after_launch = None, set()
        if self.lends_buffer and not self.local:
            self.buffer = None
