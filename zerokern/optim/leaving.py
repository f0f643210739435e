"""Fetches gradients of zk.shard to the host bucket by bucket, during backward, and gives back their device memory.

Who uses a gradient afterwards (`p.grad`, gradient accumulation that nobody expected, another optimizer) has it brought
back from the host first, with the same bits.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from zerokern.core.units import BUFFERS
from zerokern.memory.copies import Copies
from zerokern.optim.hosted import HostCopy
from zerokern.optim.parts import in_order
from zerokern.zero.hooks import weakly
from zerokern.zero.reducing import GradReady

__all__ = ["Departure", "LeavingGradients"]

Pairs = Sequence[tuple[HostCopy, Tensor]]  # each with the gradient that is copied to it


@dataclass(eq=False)
class Departure:
    """Gradients of one bucket that are fetched: before their copies are launched, while they run, and after that.

    `places`: in the bucket. `fetch` launches the copies, until it has. No gradient is kept beyond that: buckets count
    references to theirs. `state`: what changes with the gradients, as it was when they were measured.
    """

    bucket: Any
    places: Sequence[int]
    copies: Sequence[HostCopy]
    fetch: Callable[[], Sequence[Any]] | None = None
    tickets: Sequence[Any] = ()
    state: tuple[int, list[int]] = (0, [])


class LeavingGradients:
    """Fetches the gradients of one optimizer as their buckets are reduced, before `step()` is called.

    It expects as many backward passes per step as the last step had. A gradient that was fetched too early is
    accumulated into later, which its version shows; then `step()` fetches it again. So it does where the gradient's
    memory has been handed out (`.local`, `.data`), because no version counts writes there. Plain gradients are fetched
    by `step()`. Buckets whose gradients have arrived give their device memory back, a few behind the last one.

    `shards`: a `Shards`; `parts`: each a `Part` of the update, as `parts_of` returns them. `tickets`: by part, of what
    the step at hand reads, one for each piece that is on its way.
    """

    def __init__(self, shards: Any, parts: Sequence[Any] = (), early: bool = False, passes: int = 0) -> None:
        """Listens to these parameters, if any leave `early`. `passes`: expected before the next step."""
        self.shards, self._parts = shards, parts
        self.tickets: dict[str, list[Any]] = {}
        self._gates: list[Any] = []  # tickets of gradients that may be written before the update has read them
        self._under_way: list[Any] = []  # the last ticket of each part, of the last step that was begun
        self._link = shards.host.link
        self._expected: Counter[int] = Counter({id(part): passes for part in parts})
        self._arrived: Counter[int] = Counter()
        self._early: dict[str, Departure] = {}  # since the last step, by part
        self._lock = threading.Lock()  # between a look at what is free and the word that something has become so
        self._going: deque[Departure] = deque()  # of buckets that are to give their memory back
        self._away: weakref.WeakSet[Any] = weakref.WeakSet()  # buckets that have
        self._removers: list[Callable[[], Any]] = []
        if not early or self._link is None:
            return
        shards.host.freed = weakly(self._launch)
        for part in parts:
            if part.bucket is not None:
                listeners, listener = part.bucket.shown.listeners, partial(weakly(self._reduced), part)
                listeners.append(listener)
                self._removers.append(partial(listeners.remove, listener))

    def end(self) -> None:
        """Listens no more, and brings back what programs can still see: the host's memory is about to go."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        _forget(self._early.values())
        self._early, self.tickets, self._gates, self._under_way = {}, {}, [], []
        self._going.clear()
        for bucket in list(self._away):
            bucket.bring_back()
        self._away.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a device that is gone
            self.end()

    def _reduced(self, part: Any, ready: GradReady) -> None:
        """Fetches a bucket that zk.shard has reduced, if as many passes as in the last step have come."""
        key, host, bucket = id(part), self.shards.host, part.bucket
        self._arrived[key] += 1
        if self._arrived[key] != self._expected[key]:  # another pass adds to its gradients
            with self._lock:
                last = self._early.pop(part.name, None)
            _forget(() if last is None else (last,))
            self._drop(bucket)
            return
        members = [place for place in part.members if self.shards.local[place].requires_grad]
        places = [self.shards.shards[place].place for place in members]
        grads = [ready.pieces[place] for place in places]
        copies = host.of([self.shards.local[place] for place in members])
        plain = all(grad.is_contiguous() and not grad.is_neg() for grad in grads)
        if not plain or not copies or copies[0].near or len(copies) != len(grads) or bucket.shown.handed_out():
            return
        pairs = list(zip(copies, grads, strict=True))
        # versions of what the mark stands for, not of a later launch
        versions, found, mark = [grad._version for grad in grads], host.measure(pairs), host.here()
        pieces = self.shards.pieces_of(part)
        fetch = partial(host.fetch, pairs, left_as=versions, ready=mark, found=found, pieces=pieces)
        one = self.add(part, places, pairs, fetch=fetch)
        with self._lock:
            self._early[part.name] = one
        self._launch(one)
        self.sweep()

    def _launch(self, *some: Departure) -> None:
        """Launches copies of these, or of all, but where an update has yet to read what lies where they go."""
        with self._lock:
            for one in some or self._early.values():
                if one.fetch is not None and all(copy.free for copy in one.copies):
                    one.tickets, one.fetch = one.fetch(), None

    def read(self, *, unscaled: bool) -> dict[int, Tensor]:
        """Fetches the gradients of a step, but for those that left early; returns them by the parameter's place.

        `unscaled`: GradScaler has written into gradients, which it does not count as writing.
        """
        shards, host = self.shards, self.shards.host
        early, self.tickets, self._gates = self.take(), {}, []
        try:
            grads: dict[int, Tensor] = shards.gradients()
            # those that were written, maybe, where no version counts it
            _forget(one for one in early.values() if unscaled or one.bucket.shown.handed_out())
            for part in reversed(self._parts):  # as the program has it, and as gradients came
                pairs = [(shards.copy(place), grads[place]) for place in part.members if place in grads]
                left, shown = early.get(part.name), None if part.bucket is None else part.bucket.shown
                if shown is not None and shown.released.is_released and not all(c.holds(grad) for c, grad in pairs):
                    shown.released.restore(shown)  # with what the copies have, before others are fetched there
                tickets: list[Any] = host.fetch(pairs, pieces=shards.pieces_of(part))
                if left is not None:  # of one stream: what is fetched again ends last
                    tickets = [old if new is None else new for old, new in zip_longest(left.tickets, tickets)]
                tickets = in_order(tickets, at_once=host.measures and any(copy.sumsq is None for copy, _ in pairs))
                if tickets:
                    self.tickets[part.name] = tickets
                    self._guard(part, pairs, [place for place in part.members if place in grads])
        finally:
            _forget(early.values())
        return grads

    def _guard(self, part: Any, pairs: Pairs, members: Sequence[int]) -> None:
        """Sees to it that nobody writes gradients of a part before they have been read; `members`: those that it has.

        They may give their device memory back.
        """
        shards, host, tickets = self.shards, self.shards.host, self.tickets[part.name]
        if part.bucket is None:
            own = [shards.params[place].grad for place in members]
            kept = [copy.keeps(grad) for (copy, _), grad in zip(pairs, own, strict=True) if grad is not None]
            if any(kept) or (len(tickets) > 1 and not host.delays):
                self._gates.append(tickets[-1])
            return
        shown = part.bucket.shown
        # whole parts have ended when step() returns, and may be written then; with a delay nobody waits for them
        written = host.delays and (shown.exposed or shown.replicated) and shown.keeps  # nobody sees who writes them
        if written or (len(tickets) > 1 and not host.delays):
            self._gates.append(tickets[-1])
        shown.reads_until(tickets[-1].gate)
        if not shown.released.is_released:
            places = [shards.shards[place].place for place in members]
            self.add(part, places, pairs, tickets=tickets)

    def begun(self) -> None:
        """Notes that an update has been begun that reads these gradients. What the program does to them from here on,
        it does behind their copies."""
        for ticket in self._gates:
            ticket.gate()
        self._under_way = [tickets[-1] for tickets in self.tickets.values()]
        self.tickets, self._gates = {}, []

    def gate(self) -> None:
        """Makes the current stream wait for gradients that the last update reads."""
        for ticket in self._under_way:
            ticket.gate()

    def take(self) -> dict[str, Departure]:
        """Returns what was fetched since the last call, by part; a step is about to be made of it."""
        with self._lock:
            early, self._early = self._early, {}
        self._expected, self._arrived = self._arrived, Counter()
        return {name: one for name, one in early.items() if one.tickets}

    def add(self, part: Any, places: Sequence[int], pairs: Pairs, **fetched: Any) -> Departure:
        """Notes that the gradients of a part, a whole bucket of zk.shard, are fetched, with `fetch` or by `tickets`.

        A bucket that is not all of this optimizer's, or that another one listens to, keeps its memory.
        """
        bucket = part.bucket
        shown, copies = bucket.shown, [copy for copy, _ in pairs]
        one = Departure(bucket, places, copies, **fetched)
        self._drop(bucket)
        mine = len(part.members) == len(bucket.entries) and len(shown.listeners) <= 1
        mine = mine and len(shown.pieces) == len(bucket.entries)  # else nothing was reduced: they were set by hand
        if not mine or bucket.replicated or not pairs or any(copy.stays is not None for copy in copies):
            return one
        if all(grad is shown.pieces[place] for place, (_, grad) in zip(places, pairs, strict=True)):
            one.state = _state_of(one)
            self._going.append(one)
        return one

    def _drop(self, bucket: Any) -> None:
        """Another pass adds to gradients of this bucket, or others are fetched."""
        if any(one.bucket is bucket for one in self._going):
            self._going = deque(one for one in self._going if one.bucket is not bucket)

    def sweep(self, most: int = BUFFERS) -> None:
        """Gives back what has been fetched. If more than `most` buckets are on their way, the oldest is waited for.

        On a GPU the current stream waits, and not the host: what is allocated there next is used behind the copy.
        """
        while self._going:
            one = self._going[0]
            tickets = [*dict.fromkeys(filter(None, one.tickets))]  # of pieces, in order: the last ends last
            if not tickets or not (tickets[-1].done() or len(self._going) > most):
                return
            self._going.popleft()
            if one.state != _state_of(one):  # somebody has written to them
                continue
            held, reduced = 0, one.bucket.shown.reduced
            if not tickets[-1].done() and reduced.is_cuda:
                tickets[-1].gate()
                held = sum(ticket.references_to(reduced) for ticket in tickets)
            else:
                try:
                    for ticket in tickets:
                        ticket.wait()
                except Exception:  # `step()` says so
                    continue
            if one.bucket.release(partial(_restore, self._link, one.places, one.copies), more=held):
                self._away.add(one.bucket)
                for copy in one.copies:
                    copy.left = weakref.WeakMethod(one.bucket.shown.land)


def _state_of(one: Departure) -> tuple[int, list[int]]:
    """Returns what changes with the gradients: their memory, and their versions."""
    shown = one.bucket.shown
    return shown.times_made, [shown.pieces[place]._version for place in one.places]


def _forget(some: Iterable[Departure]) -> None:
    """Has the gradients of these fetched again."""
    for one in some:
        for copy in one.copies:
            copy.fetched = None


def _restore(link: Copies, places: Sequence[int], copies: Sequence[HostCopy], pieces: Sequence[Tensor] | None) -> None:
    """Copies gradients from the host into these pieces of their bucket, before whoever is next on a GPU's current
    stream; None: they are not needed any more."""
    for copy in copies:
        copy.left = None
    if pieces is not None:
        targets = [pieces[place].detach() for place in places]
        ticket = link.to_device([copy.grad for copy in copies], targets, checked=True)
        ticket.gate() if targets[0].is_cuda else ticket.wait()
