"""`Inbox`: which gradients of one bucket have arrived in a backward pass, and what `.grad` held before.

Hooks after accumulation say what arrives. From its second pass on a bucket of many hears of one gradient alone, the one
that came last in the pass before: then it looks in `.grad` of the others, and hears of those that are missing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from operator import attrgetter

import torch
from torch import Tensor

from zerokern.core.units import SMALL_GRADIENT
from zerokern.zero import checks
from zerokern.zero.hooks import NO_PASS, Arrivals, LeafHooks, hear, silence
from zerokern.zero.params import BucketMemory
from zerokern.zero.publishing import without_waiting
from zerokern.zero.reducing import Flattening
from zerokern.zero.sharded import Sharded
from zerokern.zero.shown import ShownGradients

__all__ = ["Inbox"]

FEWEST_SILENCED = 32
"""leaves of a bucket; to silence fewer and hear them again takes as long as their hooks (units of 12 at stage 3)"""
_grad_of = attrgetter("grad")


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
        self.leaves: list[Tensor] = [one.param if one.full is None else one.full for one in entries]
        self.params: list[Tensor] = [one.param for one in entries]
        self.lands_in_params = lands_in_params
        # On a device one launch flattens all. On a CPU one call does where all are small; else each goes at once: its
        # memory and the cache serve the next, and small ones that waited between large ones would fragment the heap.
        on_device = memory.device.type != "cpu"
        together = on_device or all(one.place.numel * dtype.itemsize <= SMALL_GRADIENT for one in entries)
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
        self._hooks: dict[int, LeafHooks] = {}  # of leaves whose gradients wait
        self.last: int | None = None  # the place whose gradient completed the bucket in this pass
        self._awaited: int | None = None  # the one that did in the pass before, if no other is heard of
        self._unheard: dict[int, LeafHooks] = {}  # of others, meanwhile
        self._task_heard = NO_PASS  # the task once they are heard again

    def hears(self, place: int, found: LeafHooks) -> None:
        """Tells what autograd calls after accumulation into a leaf."""
        if self.waits[place]:
            self._hooks[place] = found

    @property
    def task(self) -> int:
        return self.arrivals.task

    @task.setter
    def task(self, number: int) -> None:
        self.arrivals.task = number

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
        self._awaited, self.last = self.last, None
        if task != NO_PASS and self._awaited is not None and len(self._hooks) >= FEWEST_SILENCED:
            self._unheard = {**self._hooks}
            self._unheard.pop(self._awaited, None)
            if arrived is not None:
                self._unheard.pop(arrived, None)
            self.arrivals.task, self._task_heard = NO_PASS, task
            silence(self._unheard.values())

    def hear(self) -> None:
        """Hears of every gradient again that is yet to come, and notes what came meanwhile."""
        if self._unheard:
            with without_waiting():
                if self._flattening.are_there():
                    self.arrived.update(self._unheard)
                else:
                    self.arrived.update(place for place in self._unheard if self.leaves[place].grad is not None)
            self._hear()

    def hear_rest(self, place: int) -> None:
        """Hears of every gradient again, if the one that was awaited has come at this place."""
        if place == self._awaited:
            self.hear()

    def _hear(self) -> None:
        if self._unheard:
            hear(self._unheard.values())
            self.arrivals.task, self._unheard, self._awaited = self._task_heard, {}, None

    def look_at_each(self) -> None:
        """Has each gradient looked at that is yet to come in this pass."""
        self.hear()
        self.task = NO_PASS

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
        self._hear()
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
        self.task = NO_PASS

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
        self.look_at_each()
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
