"""Gives back device memory of gradients that have been fetched to the host: bucket by bucket, a few on their way.

Who uses a gradient afterwards (`p.grad`, gradient accumulation that nobody expected, another optimizer) has it brought
back from the host first, with the same bits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.core.units import BUFFERS

__all__ = ["GradientRelease"]

Pairs = Sequence[tuple[Any, Tensor]]  # of a `HostCopy` and the gradient that is copied to it


class _Leaving(NamedTuple):
    """One bucket whose gradients are on their way to the host. `fetch`: has their `tickets`, once launched.

    It keeps no gradient: buckets count references to theirs.
    """

    bucket: Any
    copies: Sequence[tuple[int, Any]]  # by places in the bucket
    state: tuple[int, list[int]]  # of the gradients, when their copies were launched
    fetch: Any


class _Fetched(NamedTuple):
    tickets: Sequence[Any]


class GradientRelease:
    """The buckets of one optimizer whose gradients leave, or have left, their device. `link`: the copies to it."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self._going: deque[_Leaving] = deque()
        self._away: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, part: Any, places: Sequence[int], pairs: Pairs, fetch: Any) -> None:
        """Notes that the gradients of a part, a whole bucket of zk.shard, are being fetched.

        `places`: in the bucket. A bucket that is not all of this optimizer's, or that another one listens to, stays.
        """
        bucket = part.sharding.gradient_buckets[part.bucket]
        self.drop(bucket)
        pieces = bucket.shown.pieces
        mine = len(part.members) == len(bucket.entries) and len(bucket.shown.listeners) <= 1
        mine = mine and len(pieces) == len(bucket.entries)  # else nothing was reduced: they were set by hand
        if not mine or bucket.replicated or not pairs or any(copy.stays is not None for copy, _ in pairs):
            return
        if all(grad is pieces[place] for place, (_, grad) in zip(places, pairs, strict=True)):
            copies = [(place, copy) for place, (copy, _) in zip(places, pairs, strict=True)]
            self._going.append(_Leaving(bucket, copies, _state(bucket, copies), fetch))

    def fetched(self, part: Any, places: Sequence[int], pairs: Pairs, tickets: Sequence[Any]) -> None:
        """As `add`, for copies that `step()` has launched."""
        self.add(part, places, pairs, _Fetched(tickets))

    def drop(self, bucket: Any) -> None:
        """Another pass adds to gradients of this bucket, or others are fetched."""
        if any(one.bucket is bucket for one in self._going):
            self._going = deque(one for one in self._going if one.bucket is not bucket)

    def sweep(self, most: int = BUFFERS) -> None:
        """Gives back what has been fetched. If more than `most` buckets are on their way, the oldest is waited for.

        On a GPU the current stream waits, and not the host: what is allocated there next is used behind the copy.
        """
        while self._going:
            one = self._going[0]
            tickets = [*dict.fromkeys(filter(None, one.fetch.tickets))]  # of pieces, in order: the last ends last
            if not tickets or not (tickets[-1].done() or len(self._going) > most):
                return
            self._going.popleft()
            if one.state != _state(one.bucket, one.copies):  # somebody has written to them
                continue
            held = 0
            if not tickets[-1].done() and one.bucket.shown.reduced.is_cuda:
                tickets[-1].gate()
                held = sum(ticket.references_to(one.bucket.shown.reduced) for ticket in tickets)
            else:
                try:
                    for ticket in tickets:
                        ticket.wait()
                except Exception:  # `step()` says so
                    continue
            restore = _Restore(self._link, one.copies)
            if one.bucket.release(restore, more=held):
                self._away.add(one.bucket)
                for _, copy in one.copies:
                    copy.left = weakref.WeakMethod(one.bucket.shown.land)

    def end(self) -> None:
        """Brings back what programs can still see: the host's memory is about to go."""
        self._going.clear()
        for bucket in list(self._away):
            bucket.bring_back()
        self._away.clear()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


def _state(bucket: Any, copies: Sequence[tuple[int, Any]]) -> tuple[int, list[int]]:
    """Returns what changes with the gradients: their memory, or their versions."""
    return bucket.shown.times_made, [bucket.shown.pieces[place]._version for place, _ in copies]


class _Restore:
    """Brings the gradients of one bucket back from the host."""

    def __init__(self, link: Any, copies: Sequence[tuple[int, Any]]) -> None:
        """`copies`: by the places of their parameters in the bucket."""
        self._link, self._copies = link, copies

    def __call__(self, pieces: Sequence[Tensor] | None) -> None:
        """Copies the gradients into these pieces, before whoever is next on a GPU's current stream; None: they are not
        needed any more."""
        for _, copy in self._copies:
            copy.left = None
        if pieces is not None:
            targets = [pieces[place].detach() for place, _ in self._copies]
            ticket = self._link.to_device([copy.grad for _, copy in self._copies], targets, checked=True)
            ticket.gate() if targets[0].is_cuda else ticket.wait()
