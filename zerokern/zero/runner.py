"""Unshards units before they compute and reshards them afterwards (stage 3): what hooks of modules and autograd call.

The order in which units are used is recorded. As long as a pass follows it, the next unit is gathered while this one
computes; a pass that does not is followed, once all ranks have agreed that they deviate in the same way. Which units
are whole when is said in `schedule/passes.py`, and done here: besides the root at most two, as long as `Prefetch` says
no more, and those that lie in each other or are used outside of their modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group, during
from zerokern.core.errors import StateError
from zerokern.kernels.triton.backend import capturing
from zerokern.schedule.passes import Prefetch, UnitOrder, moves_before
from zerokern.zero import hooks
from zerokern.zero.containers import mapped
from zerokern.zero.hooks import graph_task, in_backward
from zerokern.zero.saved_tensors import Notes, SavedTensors
from zerokern.zero.sharded import Sharded
from zerokern.zero.sharded_ops import GET_DATA, leaves
from zerokern.zero.unit import GATHERING, WHOLE, Unit

__all__ = ["UnitRunner"]

_PART_IN_GRAPH = (
    "{called} is captured in a CUDA graph without the forward of the whole model, or a backward pass without the "
    "forward that it belongs to: at stage 3 the memory of a unit's full parameters comes and goes, and a graph would "
    "read what is no more there; capture whole steps, or shard at stage 2, where parameters have fixed addresses"
)


class UnitRunner:
    """Calls the verbs of units, before and after their forward, and before their backward."""

    def __init__(self, units: Sequence[Unit], group: Group, ahead: Prefetch = Prefetch()) -> None:  # noqa: B008  frozen
        self.units, self.root, self.group, self.ahead = units, units[0], group, ahead
        self.forward, self.backward = UnitOrder("forward", group), UnitOrder("backward", group)
        self.is_updating: Callable[[], bool] = lambda: False  # whether an update of some unit is under way
        self.begins_backward: Callable[[], None] = lambda: None  # called as a backward pass begins
        self.keeps = False  # whether what is whole stays so from pass to pass
        self._kept: set[int] = set()  # units that stayed so, in the first pass that lets go of them, until their turn
        self._task = -1
        self._watch: object = None  # of the backward pass that is running
        self._in_graph = False  # whether the pass goes into a CUDA graph
        modules = {unit.module for unit in units}
        # units whose gradients may come until the pass ends: those that enclose others, and those of which something
        # is used outside of their modules, in the last pass and, once ranks have agreed on it, in this one
        self._enclosing = {unit.number for unit in units if unit is self.root or len(unit.modules & modules) > 1}
        self._outside: set[int] = set()
        self._collected: set[int] = set()  # in this pass
        sharded = [(unit, memory) for unit in units for memory in unit.sharded]
        self._moves = bool(sharded)  # on one rank parameters stay where they are
        self._captures = self._moves and group.device.type == "cuda"  # whether a pass may go into a CUDA graph
        self._fetches = not group.alone and any(memory.rest is not None for _, memory in sharded)
        self._of_param = {id(entry.param): (unit, entry) for unit in units for entry in unit.entries}
        here = weakref.ref(self)
        self.saved = SavedTensors(
            {memory.full.untyped_storage()._cdata: Notes(memory, unit, here) for unit, memory in sharded}
        )
        # forwards that are running, whether their saved tensors are packed, and the number of the graph's next node
        self._running: list[tuple[Unit, bool, int]] = []
        self._active: set[int] = set()
        for unit in units:
            unit.active = self._active
        self._begins = hooks.weakly(self.before_backward, hooks.refuse_gradients)

    def hook_units(self, modules: Sequence[nn.Module], settle: Callable[[], None]) -> None:
        """Hook the forwards of all units but the root's, and calls on their parameters.

        Modules and parameters must not keep the runner. `settle`: returns once no update of a parameter is under way.
        """
        before, after = hooks.weakly(self.before_forward, _refuse_gone), hooks.weakly(self.after_forward)
        for unit, module in zip(self.units[1:], modules[1:], strict=True):
            hooks.wrap_forward(module, partial(before, unit), partial(after, unit))
        call, in_forward = hooks.weakly(self._call_outside, _not_implemented), hooks.weakly(self._in_forward)
        for unit in self.units:
            for entry in unit.entries:
                assert isinstance(entry.param, Sharded)
                entry.param.use, entry.param.in_forward, entry.param.settle = call, in_forward, settle

    def _nbytes_of(self, number: int) -> int:
        return self.units[number].nbytes

    def _active_units(self) -> list[Unit]:
        """Those that `reshard` does something for, in one order on all ranks."""
        return [self.units[number] for number in sorted(self._active)]

    def begin_forward(self) -> None:
        """A forward of the root begins: what an earlier one left whole is of no more use."""
        self.keep_writes()
        if not in_backward() and not self._all_materialized():
            while self._running:  # torch calls no hook after a forward that Ctrl-C has broken off
                self._end_forward(self._running[-1][0])
            self.saved.end_what_is_left()
            self._end_pass()
            self._in_graph = self._is_captured()
            self.forward.begin()

    def _is_captured(self) -> bool:
        return self._captures and capturing(self.group.device)

    def _refuse_part_in_graph(self, unit: Unit, *, outside: bool = False) -> None:
        """Refuses what a graph would read or leave behind; what is whole otherwise is gathered once more."""
        captured = self._is_captured()
        if captured is self._in_graph:
            return
        if in_backward() or (captured and not outside):
            raise StateError(_PART_IN_GRAPH.format(called=unit.called))
        self._end_pass()
        self._in_graph = captured

    def reshard_all(self) -> None:
        """Reshard all units, and wait until their shards may be written."""
        self._kept.clear()
        for unit in self._active_units():
            unit.outside, unit.computing = False, 0
            unit.reshard()
        for unit in self.units:
            unit.wait_for_copies()

    def keep_unsharded(self, keeps: bool) -> None:
        """Say whether units stay whole from pass to pass; the pass after the last of these reshards them."""
        self._kept = set(self._active) if self.keeps and not keeps else set()
        self.keeps = keeps

    def _end_pass(self) -> None:
        if not self.keeps or self._is_captured() is not self._in_graph:  # a graph has memory of its own
            self.reshard_all()
            return
        for unit in self._active_units():
            unit.outside, unit.computing = False, 0
            unit.registrations.register_sharded()

    def _all_materialized(self) -> bool:
        return all(unit.all_materialized for unit in self.units)

    def before_forward(self, unit: Unit, *_: Any) -> None:
        """Unshard a unit, and let its modules compute with the full parameters."""
        if unit.all_materialized and (unit is not self.root or self._all_materialized()):
            unit.bypassed += 1
            return
        if self._captures:
            self._refuse_part_in_graph(unit)
        unit.computing += 1
        if graph_task() == -1:
            self._take_turn(unit, self.forward)
        else:  # a forward that is repeated for its activations: its order is the backward's
            self.join_backward()
            # one that was kept whole for this turn takes it, or the order would be another one in every other pass
            if not unit.is_whole or self.backward.coming(1) == [unit.number]:
                self._take_turn(unit, self.backward)
            elif unit.state is not WHOLE:
                unit.unshard()  # it computes once more
        unit.registrations.register_full(materialized=bool(unit.materialized))
        unit.keep_writes()  # by others, who use it from outside
        unit.watch_writes()
        packs = torch.is_grad_enabled() and self._moves and self.saved.begin()
        self._running.append((unit, packs, hooks.next_node()))

    def keep_writes(self) -> None:
        """Keep what was written to parameters that are used outside of their modules."""
        for unit in self._active_units():
            if unit.outside:
                unit.keep_writes()
                unit.watch_writes()

    def _end_forward(self, unit: Unit) -> int:
        """End a forward, and those within it that broke off; return the number of its first node."""
        first, running = 0, self._running
        is_running = bool(running) and (running[-1][0] is unit or any(one is unit for one, *_ in running))
        while is_running:
            ended, packs, first = running.pop()
            if packs:
                self.saved.end()
            is_running = ended is not unit
        return first

    def _take_turn(self, unit: Unit, order: UnitOrder) -> None:
        """Make a unit whole whose turn it is, begin to gather what follows it, and reshard what is done."""
        if not self._moves:  # in whatever order
            unit.unshard()
            return
        goes_back = order is self.backward and unit is not self.root
        if self.keeps and order is self.backward and unit.is_whole:  # nothing is to be gathered
            return
        over = self._over(unit) if goes_back and not order.left else []
        more_comes = False  # of one that has had all of the turns on record
        if over:
            ended = [one for one in over if not one.pending]
            more_comes = len(ended) < len(over)
            self._collect(ended)  # first: others may wait for these
        with during(order.of(unit)):
            over = []

            def what_else() -> str:
                if goes_back and not unit.computing:  # or it repeats a forward, within which others go back again
                    over.extend(self._over(unit))
                return f", when nothing more comes of {', '.join(one.called for one in over)}" if over else ""

            order.use(unit, what_else, leaves=more_comes)
            if over:
                self._collect(over)
            done = self._done(unit) if goes_back else []
            coming = order.coming(self.ahead.depth)
            for verb, number in moves_before(unit.number, coming, self._active, done, self._nbytes_of, self.ahead):
                if verb == "Release":
                    if not self.keeps:
                        self.units[number].reshard()
                elif number == unit.number:
                    unit.unshard()
                    unit.wait_for_unshard()
                elif not (self.units[number].is_on_its_way or self.is_updating()):  # an update would keep this one back
                    self.units[number].unshard()
            # shards come from where they rest one unit earlier than they are gathered
            for number in order.coming(self.ahead.depth + 1)[self.ahead.depth :] if self._fetches else ():
                if not self.is_updating():
                    self.units[number].prefetch()

    def after_forward(self, unit: Unit, result: Any) -> None:
        """End a unit's forward. With the gradients of the outputs that it has computed its backward begins."""
        if unit.bypassed:
            unit.bypassed -= 1
            return
        first = self._end_forward(unit)
        unit.computing = max(0, unit.computing - 1)
        unit.keep_writes()
        if unit.computing or graph_task() != -1:
            return
        unit.registrations.register_sharded()
        outputs = list(hooks.graph_tensors(result, first)) if torch.is_grad_enabled() else []
        recorded, forward = bool(outputs), _Forward()
        if recorded:
            unit.pending.add(forward)
        if unit is self.root:
            if not recorded:
                self._end_pass()
            self.forward.end()
        elif not self.keeps and not unit.outside and not (recorded and self.forward.last(unit.number)):
            unit.reshard()
        begins = partial(self._begins, unit, forward)
        for output in outputs:
            hooks.when_gradient_is_there(output, begins)

    def join_backward(self) -> None:
        """Begin a backward pass, if this is the first that happens in it."""
        task = hooks.current_pass()
        if task != self._task:
            self.begins_backward()
            self._task = task
            self.backward.begin()
            self._collected.clear()
            self._agree_on_uses_outside()
            self._watch = hooks.at_end_of_backward(self.end_backward, hooks.weakly(self._broken))

    def before_backward(self, unit: Unit, forward: _Forward, *_: Any) -> None:
        """Unshard a unit: the gradient of an output of this forward is there."""
        task = hooks.current_pass()
        if task == forward.begun:
            return
        forward.begun = task
        unit.pending.discard(forward)
        self._begin_backward(unit)
        # for forwards within it that are repeated for their activations
        unit.registrations.register_full(materialized=bool(unit.materialized))

    def before_reading(self, unit: Unit) -> None:
        """Unshard a unit: what autograd saved of its parameters is about to be read."""
        if not in_backward():
            self.use_outside(unit)
        elif unit.began != hooks.current_pass():
            self._begin_backward(unit)
        elif not unit.is_whole:
            unit.outside = unit.is_sharded  # it seemed to be done: once more would be too often
            self._begin_backward(unit)

    def _begin_backward(self, unit: Unit) -> None:
        if self._captures:
            self._refuse_part_in_graph(unit)
        self.join_backward()
        unit.began = self._task
        self._kept.discard(unit.number)
        self._take_turn(unit, self.backward)

    def _done(self, unit: Unit) -> list[int]:
        """The units whose backward began before this one's: autograd goes back through the forward in order."""
        found, others = [], self._active - self._kept - {unit.number, self.root.number}
        for number in sorted(others):
            one = self.units[number]
            if not (one.outside or one.computing or one.is_sharded or one.encloses(unit)):
                found.append(number)
        return found

    def _agree_on_uses_outside(self) -> None:
        """Agrees with all ranks on the units that were used outside of their modules: these are reduced last."""
        outside = {unit.number for unit in self._active_units() if unit.outside}
        if not self._moves or outside == self._outside:
            self.group.follow("a backward pass")
            return
        named = ", ".join(self.units[number].called for number in sorted(outside)) or "none"
        self.group.agree(f"a backward pass, after uses outside of their modules of {named}")
        self._outside = outside

    @property
    def takes_turns(self) -> bool:
        """Whether backward passes go through the units in an order that all ranks agree on."""
        return self._moves and not self.keeps

    def is_over_next(self, number: int) -> bool:
        """Whether all ranks reduce this unit's gradients when the next unit's turn comes, whatever has arrived."""
        ends_late = number in self._enclosing or number in self._outside
        return not ends_late and not self.units[number].pending and self.backward.at_last_turn_of(number)

    def collect_rest(self) -> None:
        """Reduces what is left of the gradients of units that have had a turn in this pass, which is over."""
        rest = [number for number in self.backward.used() if number not in self._collected]
        self._collect([self.units[number] for number in rest if number != self.root.number])

    def _over(self, unit: Unit) -> list[Unit]:
        """Units of which no more gradients come once it is this one's turn, the last one first.

        By what all ranks know alike, the recorded order. Where they leave it each goes by its own forwards, and they
        agree on what comes of that: what they reduce, and in which order, must be the same.
        """
        left, found = self.backward.left, []
        used = self.backward.used()
        coming = [] if left or self._collected.issuperset(used) else self.backward.coming()
        for number in used:
            if number in self._collected:
                continue
            other = self.units[number]
            if other is unit or other is self.root or number in self._outside or number in coming:
                continue
            if not other.encloses(unit) and (not left or (other.began == self._task and not other.pending)):
                found.append(other)
        return found

    def _collect(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._collected.add(unit.number)
            if unit.state in (GATHERING, WHOLE):
                unit.wait_for_unshard()  # one gathered ahead is whole already on a rank where its memory was kept
                unit.collect()
            else:
                unit.reduce()  # it was released meanwhile, while another one repeated its forward

    def use_outside(self, unit: Unit) -> None:
        """Make a unit whole until the pass ends: a parameter of it is used outside of its modules."""
        self._refuse_part_in_graph(unit, outside=True)
        unit.outside = True
        if in_backward():
            self.join_backward()
        order = self.backward if in_backward() else self.forward
        with during(order.of(unit)):
            if unit.is_sharded:
                order.use(unit)
            unit.unshard()
            unit.wait_for_unshard()
            unit.wait_for_copies()  # between steps anybody may write next
        unit.watch_writes()

    def _call_outside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function that was given sharded parameters, with the full ones in their place."""
        given = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        if torch.is_grad_enabled() and any(map(_is_detached_leaf, given)):
            return NotImplemented
        full = partial(mapped, change=self._full_for)
        if func is torch.autograd.grad:  # looks at the graph, and not at values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*full(args), **full(kwargs))
        known = (self._of_param.get(id(one)) for one in map(_original, given) if isinstance(one, Sharded))
        for number in sorted({found[0].number for found in known if found is not None}):
            self.use_outside(self.units[number])
        packs = torch.is_grad_enabled() and self.saved.begin()
        try:
            func = Tensor.detach if func == GET_DATA else func  # so that writes to it count
            return func(*full(args), **full(kwargs))
        finally:
            if packs:
                self.saved.end()

    def _full_for(self, given: Tensor) -> Tensor:
        known = _original(given)
        found = self._of_param.get(id(known)) if isinstance(known, Sharded) else None
        if found is None:
            return given
        full: Tensor = found[1].full
        return full if given is known else full.detach()  # as a Function is given again what it has saved

    def _in_forward(self) -> bool:
        return self.root.computing > 0

    def _broken(self) -> None:
        """Gives the modules their parameters back after an error in backward: `zero_grad()` is to find their gradients.

        The rest is done where ranks are in step.
        """
        for unit in self._active_units():
            unit.registrations.register_sharded()

    def end_backward(self) -> None:
        """Reshard what is still whole."""
        self._watch = None
        for unit in self.units:
            unit.pending.clear()
        self.backward.forget_rest()
        self._end_pass()


class _Forward:
    """A forward of a unit whose outputs autograd may go back from."""

    begun = -1  # the pass in which the gradient of an output came first


def _original(value: Tensor) -> Tensor:
    """What a sharded parameter was detached of, or the tensor itself."""
    found: Tensor | None = getattr(value, "original", None)
    return value if found is None else found


def _is_detached_leaf(value: Tensor) -> bool:
    """Whether this is `p.detach().requires_grad_()`, whose gradients are none of the parameter's."""
    return isinstance(value, Sharded) and value.original is not None and value.requires_grad


def _not_implemented(*_: Any) -> Any:
    return NotImplemented


def _refuse_gone(unit: Unit, *_: Any) -> None:
    raise StateError(f"{unit.called} is of a sharded model that is gone; keep the model as long as its parts")
