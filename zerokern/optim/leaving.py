"""Copies gradients of zk.shard to the host during backward, bucket by bucket, and not only when `step()` is called.

How many backward passes a step has is what the last one had. A gradient that leaves too early is accumulated into
later, which its version shows; then it is fetched again in `step()`, as is one whose memory has been handed out
(`.local`, `.data`), where writes count for nobody. Plain gradients are read at `step()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zerokern.optim.hosted import HostCopies, HostCopy
from zerokern.optim.parts import Part
from zerokern.optim.shards import Shards
from zerokern.zero.reducing import GradReady

__all__ = ["Departure", "Leaving"]


class Departure:
    """Gradients of one part that leave before `step()`: at once, or as soon as those before them have been read."""

    def __init__(self, host: HostCopies, pairs: list[tuple[HostCopy, Tensor]], handed_out: Callable[[], bool]) -> None:
        self._host, self._pairs, self._handed_out = host, pairs, handed_out
        self._versions = [grad._version for _, grad in pairs]  # of what the mark stands for, not of a later launch
        self._mark = host.here()
        self.ticket: Any = None

    @property
    def may_leave(self) -> bool:
        return all(copy.free for copy, _ in self._pairs)

    def launch(self) -> None:
        self.ticket = self._host.fetch(self._pairs, left_as=self._versions, ready=self._mark)

    def compare(self) -> None:
        """`step()` was called: gradients that somebody may have written without a count are fetched again."""
        if self._handed_out():
            self.forget()

    def forget(self) -> None:
        """From here on nobody asks whether a gradient has left."""
        for copy, _ in self._pairs:
            copy.fetched = None


class Leaving:
    """Listens to the buckets of one optimizer's parameters."""

    def __init__(self, shards: Shards, parts: Sequence[Part], early: bool) -> None:
        self.shards = shards
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._left: dict[str, Departure] = {}
        self._held_back: list[Departure] = []
        self._lock = threading.Lock()
        self._removers: list[Callable[[], Any]] = []
        if not early or shards.host.link is None:
            return
        there = weakref.ref(self)
        shards.host.freed = partial(_freed, there)
        for part in parts:
            if part.sharding is not None:
                bucket, listener = part.sharding.gradient_buckets[part.bucket], partial(_reduced, there, part)
                bucket.listeners.append(listener)
                self._removers.append(partial(bucket.listeners.remove, listener))

    @classmethod
    def of(cls, last: Leaving | None, shards: Shards, parts: Sequence[Part], early: bool) -> Leaving:
        """Those of other parameters are gone."""
        if last is not None:
            last.remove()
        return cls(shards, parts, early)

    def remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()
        for departure in self._left.values():
            departure.forget()

    def __del__(self) -> None:
        self.remove()

    def reduced(self, part: Part, ready: GradReady) -> None:
        """zk.shard has reduced a bucket: what there is on this rank is final, if no other pass comes."""
        key = id(part)
        self._arrived[key] = self._arrived.get(key, 0) + 1
        if self._arrived[key] != self._expected.get(key):
            self._recall(part)
            return
        places = [place for place in part.members if self.shards.near[place].requires_grad]
        homes: list[Any] = [self.shards.homes[place] for place in places]
        grads = [ready.pieces[home.place] for home in homes]
        bucket = part.sharding.gradient_buckets[part.bucket]
        self._leave(part, [self.shards.near[place] for place in places], grads, bucket.handed_out)

    def _recall(self, part: Part) -> None:
        """Another pass adds to what has left: it is fetched in `step()`."""
        with self._lock:
            departure = self._left.pop(part.name, None)
            if departure is not None:
                departure.forget()
                self._held_back = [one for one in self._held_back if one is not departure]

    def _leave(
        self, part: Part, near: Sequence[Tensor], grads: Sequence[Tensor], handed_out: Callable[[], bool]
    ) -> None:
        host = self.shards.host
        copies = host.of(near)
        plain = all(grad.is_contiguous() and not grad.is_neg() for grad in grads)
        whole = plain and len(copies) == len(grads) == len(near)
        if not whole or not near or handed_out():
            return
        departure = Departure(host, list(zip(copies, grads, strict=True)), handed_out)
        with self._lock:  # between a look at what is free and the word that something has become so
            self._left[part.name] = departure
            if departure.may_leave:
                departure.launch()
            else:
                self._held_back.append(departure)

    def _freed(self) -> None:
        with self._lock:
            waiting, self._held_back = self._held_back, []
            for departure in waiting:
                if departure.may_leave:
                    departure.launch()
                else:
                    self._held_back.append(departure)

    def departures(self) -> dict[str, Departure]:
        """What left since the last call, by part; a step is about to be made of it."""
        with self._lock:
            left = {name: one for name, one in self._left.items() if one.ticket is not None}
            self._left, self._held_back = {}, []
        self._expected, self._arrived = self._arrived, {}
        return left


def _reduced(leaving: weakref.ref[Leaving], part: Part, ready: GradReady) -> None:
    there = leaving()
    if there is not None:
        there.reduced(part, ready)


def _freed(leaving: weakref.ref[Leaving]) -> None:
    there = leaving()
    if there is not None:
        there._freed()
