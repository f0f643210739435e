"""Stage 3: units whole while they compute, and only then.

The order in which units are used is recorded. As long as a pass follows it, the next unit is gathered while this one
computes; a pass that does not is followed, once all ranks have agreed that they deviate in the same way. At most two
units besides the root's are whole at a time, more only where units lie in each other or are used from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zerokern.comm import Group, Handle
from zerokern.zero.homes import home_of
from zerokern.zero.hooks import in_backward
from zerokern.zero.params import BucketMemory
from zerokern.zero.units import Owner, Unit

__all__ = ["GatheredUnit", "Gatherer", "Trace"]


class Trace:
    """The order of the units in a pass of one kind, as it was the last time."""

    def __init__(self, kind: str, group: Group) -> None:
        self.kind, self._group = kind, group
        self._order: list[int] = []
        self._at = 0
        self._known = -1

    def begin(self) -> None:
        self._at = 0

    def use(self, number: int) -> None:
        """This unit is next, on this rank; raises if another rank is about to do something else."""
        key = f"{self.kind} of unit {number}"
        if self._order[self._at : self._at + 1] == [number]:
            self._group.follow(key)
        else:
            self._group.agree(key)
            self._order[self._at :] = [number]
        self._at += 1

    def next(self) -> int | None:
        """The unit that comes after this one, if all goes as it did."""
        return self._order[self._at] if self._at < len(self._order) else None

    def comes_again(self, number: int) -> bool:
        """Whether the unit is used again, if all goes as it did."""
        return number in self._order[self._at :]

    def end(self) -> None:
        """A pass is over, and the order is known."""
        self._known = self._at

    def last(self, number: int) -> bool:
        """Whether the pass, if all goes as it did, ends with this unit."""
        return self._at == self._known == len(self._order) and self._order[-1:] == [number]


class GatheredUnit:
    """The buckets of a unit, and the places in modules where its parameters are registered."""

    def __init__(
        self, number: int, unit: Unit, memories: Sequence[BucketMemory], owners: dict[int, list[Owner]]
    ) -> None:
        self.number, self.name, self.memories = number, unit.name, memories
        self._module, self._modules = id(unit.module), {id(module) for module in unit.module.modules()}
        self.tenants = [tenant for memory in memories for tenant in memory.tenants]
        self.places = [(owner, tenant) for tenant in self.tenants for owner in owners[id(tenant.param)]]
        self.computing = 0  # forwards of this unit that are running
        self.pending = 0  # forwards whose backward has not begun
        self.began = -1  # the pass in which its backward last did
        self.outside = False  # used by others in this pass
        self._is_in = False
        modules = {id(owner.module): owner.module for owner, _ in self.places}
        self._rnns = [module for module in modules.values() if isinstance(module, nn.RNNBase)]
        homes = [home_of(tenant.param) for tenant in self.tenants]
        self._pieces = [home.piece for home in homes if home is not None]
        self._versions = [piece._version for piece in self._pieces]
        self._handles: list[Handle] = []
        self.prepare: Callable[[], None] = _nothing  # returns once the shards are those of the last step

    def encloses(self, other: GatheredUnit) -> bool:
        """Whether the other unit's module lies within this one's."""
        return other._module in self._modules

    @property
    def whole(self) -> bool:
        """Whether it is gathered, or on its way."""
        return all(memory.gathered for memory in self.memories)

    def launch(self) -> None:
        self.prepare()
        self._notice_writes()
        for memory in self.memories:
            if not memory.gathered:
                memory.allocate()
                self._handles.append(memory.group.all_gather(memory.full, memory.shard))

    def _notice_writes(self) -> None:
        """A graph that was made with other values must not go on with these: autograd compares versions."""
        versions = [piece._version for piece in self._pieces]
        if versions != self._versions:
            self._versions = versions
            torch.autograd.graph.increment_version([tenant.full for tenant in self.tenants if tenant.full is not None])

    def wait(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()

    def release(self) -> None:
        self.wait()
        self.take_out()
        for memory in self.memories:
            memory.release()

    def put_in(self) -> None:
        """Let the modules compute with the whole parameters."""
        self._is_in = True
        for owner, tenant in self.places:
            full = tenant.full
            assert full is not None
            if full.requires_grad != tenant.param.requires_grad:
                full.requires_grad_(tenant.param.requires_grad)
            owner.module._parameters[owner.attribute] = full
        self._refresh_rnns()

    def take_out(self) -> None:
        if self._is_in:
            self._is_in = False
            for owner, tenant in self.places:
                owner.module._parameters[owner.attribute] = tenant.param
            self._refresh_rnns()

    def _refresh_rnns(self) -> None:
        """Recurrent modules keep a list of their parameters besides."""
        for module in self._rnns:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class Gatherer:
    """What the hooks call: units before and after their forward, and before their backward."""

    def __init__(self, units: Sequence[GatheredUnit], group: Group, flush: Callable[[GatheredUnit], None]) -> None:
        self.units, self.group, self._flush = units, group, flush
        self.root = units[0]
        self.forward = Trace("forward", group)
        self.backward = Trace("backward", group)
        self._task = -1
        self._makes_graph = False
        self.publishing: Callable[[], bool] = lambda: False
        self._warned: set[int] = set()

    @property
    def whole(self) -> list[GatheredUnit]:
        return [unit for unit in self.units if unit.whole]

    def begin(self) -> None:
        """A forward of the root begins: what an earlier one left whole is of no more use."""
        if not in_backward():
            self.settle()
            self.forward.begin()

    def settle(self) -> None:
        """Nothing stays whole."""
        for unit in self.units:
            unit.outside = False
            unit.computing = 0
            unit.release()

    def before_forward(self, unit: GatheredUnit) -> None:
        unit.computing += 1
        if not in_backward():  # else a forward that is repeated for its activations: its order is the backward's
            self._fetch(unit, self.forward)
        elif not unit.whole:
            self._fetch(unit, self.backward)
        unit.put_in()

    def _fetch(self, unit: GatheredUnit, trace: Trace) -> None:
        trace.use(unit.number)
        unit.launch()
        unit.wait()
        if trace is self.backward and unit is not self.root:
            self._release_done(unit)
        following = trace.next()
        if following is not None and not self.publishing():  # waiting for its update would keep this one back
            self.units[following].launch()

    def after_forward(self, unit: GatheredUnit, outputs: Sequence[Tensor], opaque: bool) -> bool:
        """Whether the outputs, those that require gradients, are to tell when the unit's backward begins.

        `opaque`: there is a result, in which no tensors are found.
        """
        unit.computing = max(0, unit.computing - 1)
        if unit.computing or in_backward():
            return False
        unit.take_out()
        recorded = torch.is_grad_enabled() and bool(outputs)
        if torch.is_grad_enabled() and opaque:
            self._keep(unit)
            return False
        if recorded:
            unit.pending += 1
        if unit is self.root:
            if not recorded:
                self.settle()
            self.forward.end()
        elif not unit.outside and not (recorded and self.forward.last(unit.number)):
            unit.release()
        return recorded

    def _keep(self, unit: GatheredUnit) -> None:
        """No output says when its backward begins, and memory that backward reads must not go before."""
        if unit.number not in self._warned:
            self._warned.add(unit.number)
            logging.getLogger("zerokern").warning(
                "unit %r returns no tensors in a form that is understood (tensors, lists, tuples, dicts, dataclasses): "
                "it stays whole until the next forward",
                unit.name or "the root",
            )

    def joins_backward(self) -> bool:
        """True for the first call of a pass."""
        task = torch._C._current_graph_task_id()
        first, self._task = task != self._task, task
        if first:
            self.backward.begin()
            self._makes_graph = torch.is_grad_enabled()
        return first

    def before_backward(self, unit: GatheredUnit) -> bool:
        """Gradients of a forward's outputs are there: its backward is next. True for the first of a pass."""
        first = self.joins_backward()
        unit.pending -= 1
        unit.began = self._task
        self._fetch(unit, self.backward)
        unit.put_in()  # for forwards within it that are repeated for their activations
        return first

    def _release_done(self, unit: GatheredUnit) -> None:
        """Autograd goes back through the forward in order: units whose backward began before this one's are done."""
        if self.group.size == 1:
            return
        following = self.backward.next()
        for other in self.units[1:]:
            if other.whole and not other.encloses(unit) and not other.outside and not other.computing:
                if other.number != following and not torch.is_grad_enabled():
                    other.release()
                if other.began == self._task and other.pending <= 0 and not self.backward.comes_again(other.number):
                    self._flush(other)

    def use_outside(self, unit: GatheredUnit) -> None:
        """A parameter of it is used outside of its modules: the unit stays whole until the end of the pass."""
        unit.outside = True
        if not unit.whole:
            (self.backward if in_backward() else self.forward).use(unit.number)
        unit.launch()
        unit.wait()

    def end_backward(self) -> None:
        """The pass is over. A graph that it made (create_graph) reads the same memory: then all stays for the next."""
        for unit in self.units:
            unit.pending = 0
        if not self._makes_graph:
            self.settle()


def _nothing() -> None:
    pass
