"""Fetches gradients of zk.shard to the host during backward, bucket by bucket, before `step()` is called."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zerokern.optim.hosted import HostCopies, HostCopy, Piece
from zerokern.optim.releasing import GradientRelease
from zerokern.zero.hooks import weakly
from zerokern.zero.reducing import GradReady

__all__ = ["EarlyFetch", "EarlyFetches"]


class EarlyFetch:
    """Copies gradients of one part to the host before `step()`: at once, or when the update has read the last ones."""

    def __init__(
        self,
        host: HostCopies,
        pairs: list[tuple[HostCopy, Tensor]],
        pieces: Sequence[Piece],
        handed_out: Callable[[], bool],
    ) -> None:
        self._host, self.pairs, self._pieces, self._handed_out = host, pairs, pieces, handed_out
        self._versions = [grad._version for _, grad in pairs]  # of what the mark stands for, not of a later launch
        self._found = host.measure(pairs)
        self._mark = host.here()
        self.tickets: list[Any] = []

    def launch_if_free(self) -> None:
        """Starts the copies, once, unless an update has yet to read what is where they go."""
        if not self.tickets and all(copy.free for copy, _ in self.pairs):
            self.tickets = self._host.fetch(
                self.pairs, left_as=self._versions, ready=self._mark, found=self._found, pieces=self._pieces
            )

    def compare(self) -> None:
        """Has gradients fetched again that somebody may have written without a version count; `step()` calls it."""
        if self._handed_out():
            self.forget()

    def forget(self) -> None:
        """Has all gradients of the part fetched again."""
        for copy, _ in self.pairs:
            copy.fetched = None


class EarlyFetches:
    """Fetches gradients as their buckets are reduced, before `step()` is called.

    It expects as many backward passes per step as the last step had. A gradient that was fetched too early is
    accumulated into later, which its version shows; then `step()` fetches it again. So it does where the gradient's
    memory has been handed out (`.local`, `.data`), because no version counts writes there. Plain gradients are fetched
    by `step()`.

    `shards`: a `Shards`; `parts`: each a `Part` of the update, as `parts_of` returns them.
    """

    def __init__(
        self, shards: Any, parts: Sequence[Any], early: bool, last: EarlyFetches | None, passes: int = 0
    ) -> None:
        """Listens to these parameters, and no more to those of `last`. `passes`: expected before the next step."""
        if last is not None:
            last.remove()
        self.shards = shards
        self.releasing = GradientRelease(shards.host.link)
        self._expected: Counter[int] = Counter({id(part): passes for part in parts})
        self._arrived: Counter[int] = Counter()
        self._fetches: dict[str, EarlyFetch] = {}
        self._lock = threading.Lock()  # between a look at what is free and the word that something has become so
        self._removers: list[Callable[[], Any]] = []
        if not early or shards.host.link is None:
            return
        shards.host.freed = weakly(self._launch)
        for part in parts:
            if part.sharding is not None:
                bucket, listener = part.sharding.gradient_buckets[part.bucket], partial(weakly(self._reduced), part)
                bucket.shown.listeners.append(listener)
                self._removers.append(partial(bucket.shown.listeners.remove, listener))

    def remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()
        for fetch in self._fetches.values():
            fetch.forget()
        self.releasing.end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a device that is gone
            self.remove()

    def _reduced(self, part: Any, ready: GradReady) -> None:
        """Fetches a bucket that zk.shard has reduced, if as many passes as in the last step have come."""
        key = id(part)
        self._arrived[key] += 1
        if self._arrived[key] != self._expected[key]:  # another pass adds to its gradients
            with self._lock:
                fetch = self._fetches.pop(part.name, None)
                if fetch is not None:
                    fetch.forget()
            self.releasing.drop(part.sharding.gradient_buckets[part.bucket])
            return
        places = [place for place in part.members if self.shards.local[place].requires_grad]
        grads = [ready.pieces[self.shards.shards[place].place] for place in places]
        copies = self.shards.host.of(self.shards.local[place] for place in places)
        handed_out = part.sharding.gradient_buckets[part.bucket].shown.handed_out
        plain = all(grad.is_contiguous() and not grad.is_neg() for grad in grads)
        if not plain or not copies or copies[0].near or len(copies) != len(grads) or handed_out():
            return
        pieces = self.shards.pieces_of(part)
        fetch = EarlyFetch(self.shards.host, list(zip(copies, grads, strict=True)), pieces, handed_out)
        with self._lock:
            self._fetches[part.name] = fetch
            fetch.launch_if_free()
        self.releasing.add(part, [self.shards.shards[place].place for place in places], fetch.pairs, fetch)
        self.releasing.sweep()

    def _launch(self) -> None:
        with self._lock:
            for fetch in self._fetches.values():
                fetch.launch_if_free()

    def take(self) -> dict[str, EarlyFetch]:
        """Returns what was fetched since the last call, by part; a step is about to be made of it."""
        with self._lock:
            fetched = {name: one for name, one in self._fetches.items() if one.tickets}
            self._fetches = {}
        self._expected, self._arrived = self._arrived, Counter()
        return fetched
