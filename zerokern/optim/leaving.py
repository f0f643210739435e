"""Gradients that leave for the host during backward, part by part, and not only when `step()` is called.

How many backward passes a step has is what the last one had. A gradient that leaves too early is accumulated into
later, which its version shows; then it is fetched again. Not every edit shows there (`.data`, GradScaler's unscale_).
What zk.shard shows of a gradient counts them all, unless its memory has been handed out. Of any other the device adds
up the bits as it leaves and once more in `step()`, those of a part in one launch, and the ones that differ follow.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import world_size
from zerokern.core.errors import StateError
from zerokern.kernels.ops import fingerprints
from zerokern.optim.device import on_device
from zerokern.optim.hosted import Host, Twin
from zerokern.optim.local import Local
from zerokern.optim.parts import Part
from zerokern.zero import hooks
from zerokern.zero.squares import GradReady

__all__ = ["Departure", "Leaving"]

_UNCOUNTED = (
    "a gradient was edited between backward and step() in a way that torch does not count (.data, or a view made under "
    "no_grad by foreign code), after it had left for the host; this step's update was not made. Edit p.grad itself, or "
    'choose schedule="overlap", which waits in step() and follows such edits'
)


def _always() -> bool:
    return True


class Departure:
    """Gradients of one part that leave before `step()`: at once, or as soon as those before them have been read.

    `prints`: room for two numbers of each, which tell edits. None: `handed_out` and versions do.
    """

    def __init__(
        self,
        host: Host,
        pairs: list[tuple[Twin, Tensor]],
        prints: Tensor | None,
        handed_out: Callable[[], bool] = lambda: False,
    ) -> None:
        self._host, self._pairs, self._prints, self._handed_out = host, pairs, prints, handed_out
        self._versions = [grad._version for _, grad in pairs]  # of what the mark stands for, not of a later launch
        self._found = None if prints is None else torch.empty_like(prints, device=pairs[0][1].device)
        self._look(0)
        self._mark = host.here()
        self._ready: Any = None
        self._printed: Any = None
        self._held = [True] * len(pairs)
        self.ticket: Any = None

    @property
    def may_leave(self) -> bool:
        return all(twin.free for twin, _ in self._pairs)

    def launch(self) -> None:
        self.ticket = self._host.fetch(self._pairs, left_as=self._versions, ready=self._mark)

    def _look(self, time: int) -> None:
        """At the bits of each gradient, as it is when the device gets there."""
        if self._found is not None:
            on_device(self._host.driver, partial(fingerprints, [grad for _, grad in self._pairs], self._found[time]))

    def look_again(self) -> None:
        """`step()` was called: what gradients are from here on does not count.

        What was fetched again already, because its version tells that it was edited, is left as it is.
        """
        self._look(1)
        self._ready = self._host.here()
        copies = self._host.copies
        assert copies is not None
        if self._found is not None and self._prints is not None:
            self._printed = copies.to_host(self._found, self._prints, ready=self._ready)

    def compare(self, grads: Mapping[int, Tensor]) -> None:
        """Which of these, by the parameter's id, are still what left."""
        if self._prints is None and self._handed_out():
            self.forget()
        current = [(twin, grads.get(id(twin.near))) for twin, _ in self._pairs]
        self._held = [grad is not None and twin.holds(grad) for twin, grad in current]

    def forget(self) -> None:
        """From here on nobody asks whether a gradient has left; `correct` may yet."""
        for twin, _ in self._pairs:
            twin.fetched = None

    def correct(self, *, may_fetch: bool) -> None:
        """Fetch again what was edited since it left.

        `may_fetch`: the program waits in `step()`. Else gradients may be others by now, and all that can be done is to
        say so before anything is updated.
        """
        if self._printed is None or self._prints is None:
            self._pairs = []
            return
        self._printed.wait()
        edited = (self._prints[0] != self._prints[1]).tolist()
        held = zip(self._pairs, self._held, edited, strict=True)
        pairs = [pair for pair, mine, one in held if mine and one]
        if pairs and not may_fetch:
            raise StateError(_UNCOUNTED)
        if pairs:
            copies = self._host.copies
            assert copies is not None
            copies.to_host(
                [grad.detach() for _, grad in pairs], [twin.grad for twin, _ in pairs], ready=self._ready
            ).wait()
        self._pairs = []


class Leaving:
    """The hooks of one optimizer's plain parameters."""

    def __init__(self, local: Local, parts: Sequence[Part], early: bool) -> None:
        self.local = local
        self._early = early and local.host is not None and local.host.copies is not None
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._left: dict[str, Departure] = {}
        self._held_back: list[Departure] = []
        self._lock = threading.Lock()
        self._missing: dict[str, int] = {}  # of a part, parameters that have yet to arrive as often as is expected
        self._part_of: dict[int, Part] = {}
        self._removers: list[Callable[[], Any]] = []
        self._prints: dict[str, Tensor] = {}
        if not self._early:
            return
        alone = world_size() == 1  # else DistributedDataParallel may reduce what has been accumulated
        there = weakref.ref(self)
        if local.host is not None:
            local.host.freed = partial(_freed, there)
        for part in parts:
            if part.sharding is not None:
                self._listen(part, there)
                continue
            for place in part.members if alone else ():
                param = local.everyone[place]
                if param.requires_grad and param is local.near[place]:
                    self._part_of[id(param)] = part
                    self._removers.append(hooks.after_accumulation(param, partial(_told, there)).remove)

    def _listen(self, part: Part, there: weakref.ref[Leaving]) -> None:
        bucket, listener = part.sharding.gradient_buckets[part.bucket], partial(_reduced, there, part)
        bucket.listeners.append(listener)
        self._removers.append(partial(bucket.listeners.remove, listener))

    @classmethod
    def of(cls, last: Leaving | None, local: Local, parts: Sequence[Part], early: bool) -> Leaving:
        """Those of other parameters are gone."""
        if last is not None:
            last.remove()
        return cls(local, parts, early)

    def remove(self) -> None:
        for remove in self._removers:
            remove()
        self._removers.clear()
        for departure in self._left.values():
            departure.forget()

    def __del__(self) -> None:
        self.remove()

    def arrived(self, param: Tensor) -> None:
        """Autograd has accumulated into its gradient."""
        key = id(param)
        self._arrived[key] = self._arrived.get(key, 0) + 1
        part = self._part_of[key]
        if self._arrived[key] != self._expected.get(key):
            self._recall(part)
            return
        self._missing[part.name] -= 1
        if not self._missing[part.name] and part.name not in self._left:
            everyone = [self.local.everyone[place] for place in part.members]
            everyone = [one for one in everyone if self._expected.get(id(one))]
            self._leave(part, everyone, [one.grad for one in everyone if one.grad is not None])

    def reduced(self, part: Part, ready: GradReady) -> None:
        """zk.shard has reduced a bucket: what there is on this rank is final, if no other pass comes."""
        key = id(part)
        self._arrived[key] = self._arrived.get(key, 0) + 1
        if self._arrived[key] != self._expected.get(key):
            self._recall(part)
            return
        places = [place for place in part.members if self.local.near[place].requires_grad]
        homes: list[Any] = [self.local.homes[place] for place in places]
        grads = [ready.pieces[home.place] for home in homes]
        self._leave(part, [self.local.near[place] for place in places], grads, ready.handed_out)

    def _recall(self, part: Part) -> None:
        """Another pass adds to what has left: it is fetched in `step()`."""
        with self._lock:
            departure = self._left.pop(part.name, None)
            if departure is not None:
                departure.forget()
                self._held_back = [one for one in self._held_back if one is not departure]

    def _leave(
        self, part: Part, near: Sequence[Tensor], grads: Sequence[Tensor], handed_out: Callable[[], bool] = _always
    ) -> None:
        host = self.local.host
        assert host is not None
        twins = host.of(near)
        plain = all(grad.is_contiguous() and not grad.is_neg() for grad in grads)
        whole = plain and len(twins) == len(grads) == len(near)
        if whole and near:
            pairs = list(zip(twins, grads, strict=True))
            prints = self._room_for(part.name, host, len(pairs)) if handed_out() else None
            departure = Departure(host, pairs, prints, handed_out)
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

    def _room_for(self, name: str, host: Host, count: int) -> Tensor:
        found = self._prints.get(name)
        if found is None or found.shape[1] != count:
            found = self._prints[name] = host.prints(count)
        return found

    def departures(self) -> dict[str, Departure]:
        """What left since the last call, by part; a step is about to be made of it."""
        with self._lock:
            left = {name: one for name, one in self._left.items() if one.ticket is not None}
            self._left, self._held_back = {}, []
        self._expected, self._arrived = self._arrived, {}
        self._missing = Counter(self._part_of[key].name for key in self._expected if key in self._part_of)
        return left


def _told(leaving: weakref.ref[Leaving], param: Tensor) -> None:
    there = leaving()
    if there is not None:
        there.arrived(param)


def _reduced(leaving: weakref.ref[Leaving], part: Part, ready: GradReady) -> None:
    there = leaving()
    if there is not None:
        there.reduced(part, ready)


def _freed(leaving: weakref.ref[Leaving]) -> None:
    there = leaving()
    if there is not None:
        there._freed()
