"""Stage 3: units whole while they compute, and only then.

The order in which units are used is recorded. As long as a pass follows it, the next unit is gathered while this one
computes; a pass that does not is followed, once all ranks have agreed that they deviate in the same way. What is whole
when is said in `schedule/passes.py`, and done here: besides the root's at most two units, as long as `Prefetch` says no
more, and those that lie in each other or are used from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import Group, during
from zerokern.schedule.passes import Prefetch, UnitOrder, moves_before
from zerokern.zero import hooks
from zerokern.zero.gathered_unit import GatheredUnit
from zerokern.zero.hooks import in_backward
from zerokern.zero.reads import Reads

__all__ = ["Gatherer"]


class Gatherer:
    """What the hooks call: units before and after their forward, and before their backward."""

    def __init__(
        self,
        units: Sequence[GatheredUnit],
        group: Group,
        flush: Callable[[GatheredUnit], None],
        ahead: Prefetch = Prefetch(),  # noqa: B008  frozen
    ) -> None:
        self.units, self.group, self._flush, self.ahead = units, group, flush, ahead
        self.root = units[0]
        self.forward = UnitOrder("forward", group)
        self.backward = UnitOrder("backward", group)
        self._nbytes = [sum(memory.nbytes for memory in unit.memories) for unit in units]
        self._task = -1
        self.keeps = False  # whether what is whole stays so from pass to pass
        self._kept: set[int] = set()  # units that stayed so, in the first pass that lets go of them, until their turn
        self.publishing: Callable[[], bool] = lambda: False
        sharded = [(unit, memory) for unit in units for memory in unit.memories if memory.sharded]
        self._comes_and_goes = bool(sharded)
        self._fetches = not group.alone and any(memory.rest is not None for _, memory in sharded)
        here = weakref.ref(self)
        self.reads = Reads(
            {memory.full.untyped_storage()._cdata: (memory, partial(_reading, here, unit)) for unit, memory in sharded}
        )
        # forwards that are running, whether they tell of reads, and the number of the next node of the graph
        self._running: list[tuple[GatheredUnit, bool, int]] = []
        self._numbers: set[int] = set()
        for unit in units:
            unit.held = self._numbers

    def _held(self) -> list[GatheredUnit]:
        """The units that may be whole, or in their modules, or written to: in one order on all ranks."""
        return [self.units[number] for number in sorted(self._numbers)]

    def begin(self) -> None:
        """A forward of the root begins: what an earlier one left whole is of no more use."""
        self.keep_writes()
        if not in_backward() and not self._all_lent():
            self._end()
            self.forward.begin()

    def settle(self) -> None:
        """Nothing stays whole."""
        self._kept.clear()
        for unit in self._held():
            unit.outside = False
            unit.computing = 0
            unit.release()
        for unit in self.units:
            unit.settle()

    def keep(self, keeps: bool) -> None:
        """Whether units stay whole from pass to pass; the pass that follows the last of these lets go of them."""
        self._kept = set(self._numbers) if self.keeps and not keeps else set()
        self.keeps = keeps

    def _end(self) -> None:
        """A pass is over: nothing stays whole, unless the next ones compute with it too."""
        if not self.keeps:
            self.settle()
            return
        for unit in self._held():
            unit.outside = False
            unit.computing = 0
            unit.take_out()

    def _all_lent(self) -> bool:
        return all(unit.all_lent for unit in self.units)

    def before_forward(self, unit: GatheredUnit) -> None:
        if unit.all_lent and (unit is not self.root or self._all_lent()):
            unit.apart += 1
            return
        unit.computing += 1
        if not in_backward():
            self._begin(unit, self.forward)
        else:  # a forward that is repeated for its activations: its order is the backward's
            self.joins_backward()
            if not unit.ready:
                self._begin(unit, self.backward)
        unit.put_in()
        unit.keep_writes()  # by others, who use it from outside
        unit.watch()
        tells = torch.is_grad_enabled() and self._comes_and_goes and self.reads.begin()
        self._running.append((unit, tells, hooks.next_node()))

    def keep_writes(self) -> None:
        """Whoever used parameters from outside of their modules may have written to them."""
        for unit in self._held():
            if unit.outside:
                unit.keep_writes()
                unit.watch()

    def _ends(self, unit: GatheredUnit) -> int:
        """A forward is over, and with it those within that broke off; returns the number of its first node."""
        first, running = 0, sum(one is unit for one, *_ in self._running)
        while running:
            ended, tells, first = self._running.pop()
            if tells:
                self.reads.end()
            if ended is unit:
                break
        return first

    def _begin(self, unit: GatheredUnit, order: UnitOrder) -> None:
        """Its turn has come: it is whole from here on, and so is what follows it soon."""
        if not self._comes_and_goes:  # in whatever order
            unit.launch()
            return
        if self.keeps and order is self.backward and unit.ready:  # the order counts where something is to be gathered
            return
        goes_back = order is self.backward and unit is not self.root
        if goes_back:
            self._flush_done(unit)  # before the others are waited for: they may wait for these
        with during(order.of(unit)):
            if order.use(unit) and goes_back:
                self._flush_done(unit)  # those that were to come again
            done = [one.number for one in self._done(unit)] if goes_back else []
            coming = order.coming(self.ahead.depth)
            for verb, number in moves_before(unit.number, coming, self._numbers, done, self._nbytes, self.ahead):
                if verb == "Release":
                    if not self.keeps:
                        self.units[number].release()
                elif number == unit.number:
                    unit.launch()
                    unit.wait()
                elif not self.publishing():  # its update would keep this one back
                    self.units[number].launch()
            # what is gathered next has to be here by then: shards come from where they rest one unit earlier
            for number in order.coming(self.ahead.depth + 1)[self.ahead.depth :] if self._fetches else ():
                if not self.publishing():
                    self.units[number].fetch()

    def after_forward(self, unit: GatheredUnit, result: Any) -> list[Tensor]:
        """The outputs whose gradients are to tell when the unit's backward begins: those that it has computed."""
        if unit.apart:
            unit.apart -= 1
            return []
        first = self._ends(unit)
        unit.computing = max(0, unit.computing - 1)
        unit.keep_writes()
        if unit.computing or in_backward():
            return []
        unit.take_out()
        outputs = list(hooks.graph_tensors(result, first)) if torch.is_grad_enabled() else []
        recorded = bool(outputs)
        if recorded:
            unit.pending += 1
        if unit is self.root:
            if not recorded:
                self._end()
            self.forward.end()
        elif not self.keeps and not unit.outside and not (recorded and self.forward.last(unit.number)):
            unit.release()
        return outputs

    def joins_backward(self) -> None:
        """Something happens in a pass, perhaps the first of it."""
        task = hooks.current_pass()
        if task != self._task:
            self._task = task
            self.backward.begin()
            hooks.at_end_of_backward(self.end_backward)

    def before_backward(self, unit: GatheredUnit) -> None:
        """Gradients of a forward's outputs are there: its backward is next, if it has any."""
        unit.pending -= 1
        self._begin_backward(unit)
        unit.put_in()  # for forwards within it that are repeated for their activations

    def reading(self, unit: GatheredUnit) -> None:
        """What autograd saved of the unit's parameters is about to be read."""
        if not in_backward():
            self.use_outside(unit)
        elif unit.began != hooks.current_pass():
            self._begin_backward(unit)
        elif not unit.ready:
            unit.outside = not unit.whole  # it seemed to be done with: once more would be too often
            self._begin_backward(unit)

    def _begin_backward(self, unit: GatheredUnit) -> None:
        self.joins_backward()
        unit.began = self._task
        self._kept.discard(unit.number)
        self._begin(unit, self.backward)

    def _done(self, unit: GatheredUnit) -> list[GatheredUnit]:
        """Autograd goes back through the forward in order: units whose backward began before this one's are done."""
        held = (one for one in self._held() if one.number not in self._kept)
        whole = (one for one in held if one.whole and one is not unit and one is not self.root)
        return [one for one in whole if not (one.encloses(unit) or one.outside or one.computing)]

    def _flush_done(self, unit: GatheredUnit) -> None:
        """Not while this one is at work on a forward that is repeated: gradients of theirs may be still to come."""
        for other in self._done(unit) if not unit.computing else ():
            if other.began == self._task and other.pending <= 0 and other.number not in self.backward.coming():
                self._flush(other)

    def use_outside(self, unit: GatheredUnit) -> None:
        """A parameter of it is used outside of its modules: the unit stays whole until the end of the pass."""
        unit.outside = True
        if in_backward():
            self.joins_backward()
        order = self.backward if in_backward() else self.forward
        with during(order.of(unit)):
            if not unit.whole:
                order.use(unit)
            unit.launch()
            unit.wait()
            unit.settle()  # between steps anybody may write next
        unit.watch()

    def end_backward(self) -> None:
        """The pass is over."""
        for unit in self.units:
            unit.pending = 0
        self._end()


def _reading(gatherer: weakref.ref[Gatherer], unit: GatheredUnit) -> Callable[[], None]:
    """What a note of the graph calls before its parameter is read; it keeps the gatherer, as the graph must."""
    there = gatherer()
    assert there is not None
    return partial(there.reading, unit)
