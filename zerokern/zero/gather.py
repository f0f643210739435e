"""Stage 3: units whole while they compute, and only then.

The order in which units are used is recorded. As long as a pass follows it, the next unit is gathered while this one
computes; a pass that does not is followed, once all ranks have agreed that they deviate in the same way. What is whole
when is said in `schedule/passes.py`, and done here: besides the root's at most two units, as long as `Ahead` says no
more, and those that lie in each other or are used from outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group, Handle, during
from zerokern.schedule.passes import Ahead, Order, turn
from zerokern.zero import guards, hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.homes import home_of
from zerokern.zero.hooks import in_backward
from zerokern.zero.params import BucketMemory, Gathered, Tenant
from zerokern.zero.reads import Reads, Resting
from zerokern.zero.sharded import Sharded
from zerokern.zero.units import Owner, Unit

__all__ = ["GatheredUnit", "Gatherer"]

_version_of = operator.attrgetter("_version")
_is_trained = operator.attrgetter("requires_grad")
_is_gathered = operator.attrgetter("gathered")
_is_touched = operator.attrgetter("touched")


class GatheredUnit:
    """The buckets of a unit, and the places in modules where its parameters are registered."""

    def __init__(
        self, number: int, unit: Unit, memories: Sequence[BucketMemory], owners: dict[int, list[Owner]]
    ) -> None:
        self.number, self.name, self.memories = number, unit.name, memories
        self.called = f"unit {self.name!r}" if self.name else "the root"
        self._module, self._modules = id(unit.module), {id(module) for module in unit.module.modules()}
        self.tenants = [tenant for memory in memories for tenant in memory.tenants]
        self._params = [tenant.param for tenant in self.tenants]
        self._fulls = [tenant.full for tenant in self.tenants if tenant.full is not None]
        pairs = zip(self._fulls, self._params, strict=True)
        self._places = [(one.module, one.attribute, param, full) for full, param in pairs for one in owners[id(param)]]
        self._comes_and_goes = [memory for memory in memories if memory.sharded]
        self.computing = 0  # forwards of this unit that are running
        self.pending = 0  # forwards whose backward has not begun
        self.began = -1  # the pass in which its backward last did
        self.outside = False  # used by others in this pass
        self.lent = 0  # parameters that are whole in the user's objects, and need no gathering
        self.apart = 0  # forwards that are running with nothing else
        self.held: set[int] = set()  # units that something has been done with since they were last released
        self._is_in = False
        modules = {id(module): module for module, *_ in self._places}
        self._rnns = [module for module in modules.values() if isinstance(module, nn.RNNBase)]
        self._pieces = [home.piece for tenant in self.tenants if (home := home_of(tenant.param)) is not None]
        self._versions = list(map(_version_of, self._pieces))
        self._handles: list[Handle] = []
        self._unwritten: list[int] | None = None  # versions of what is whole, while somebody may write to it
        if not self.whole:
            self._call_fulls(Resting)
        self.prepare: Callable[[], None] = _nothing  # returns once the shards are those of the last step

    def encloses(self, other: GatheredUnit) -> bool:
        """Whether the other unit's module lies within this one's."""
        return other._module in self._modules

    @property
    def whole(self) -> bool:
        """Whether it is gathered, or on its way."""
        return all(map(_is_gathered, self._comes_and_goes))

    @property
    def all_lent(self) -> bool:
        return self.lent == len(self.tenants)

    def launch(self) -> None:
        self.held.add(self.number)
        self.prepare()
        self._notice_writes()
        if self._comes_and_goes and not self.whole:
            kept = False
            with during(self.called, of=self.called), hooks.outside_of_transforms():
                for memory in self.memories:
                    if not memory.gathered:
                        kept |= memory.allocate()
                        self._handles.append(memory.group.all_gather(memory.full, memory.shard))
            if kept:  # whoever did may read it without a word
                self.wait()

    def _notice_writes(self) -> None:
        """A graph that was made with other values must not go on with these: autograd compares versions."""
        before, now = self._versions, list(map(_version_of, self._pieces))
        if now != before:
            self._versions = now
            pairs = zip(self._fulls, before, now, strict=True)
            torch.autograd.graph.increment_version([full for full, was, found in pairs if found != was])

    def watch(self) -> None:
        """From here on somebody has the whole parameters and may write to them."""
        if self._unwritten is None:
            self._unwritten = self._whole_versions()

    def keep_writes(self) -> None:
        """What was written to whole parameters since `watch` is to last: each rank keeps its span of what it wrote."""
        before, self._unwritten = self._unwritten, None
        if before is None:
            return
        now = self._whole_versions()
        touched = list(map(_is_touched, self._fulls))
        if now != before or any(touched):
            with torch.no_grad():
                for number, (tenant, piece) in enumerate(zip(self.tenants, self._pieces, strict=True)):
                    if now[number] != before[number] or touched[number]:
                        self._keep(tenant, piece, raised=now[number] != before[number])
            self._versions = list(map(_version_of, self._pieces))

    def _whole_versions(self) -> list[int]:
        return list(map(_version_of, self._fulls))

    @staticmethod
    def _keep(tenant: Tenant, piece: Tensor, *, raised: bool) -> None:
        home, full = home_of(tenant.param), tenant.full
        assert home is not None and full is not None
        written = home.here.cut(full)
        if written.data_ptr() == piece.data_ptr():  # one rank: it is there already
            if raised:
                torch.autograd.graph.increment_version(piece)
        elif not torch.equal(written, piece):
            piece.copy_(written)

    @property
    def ready(self) -> bool:
        return self.whole and not self._handles

    def wait(self) -> None:
        if self._handles:
            with hooks.outside_of_transforms():
                while self._handles:
                    self._handles.pop(0).wait()
            self._call_fulls(Gathered)

    def release(self) -> None:
        self.held.discard(self.number)
        self.wait()
        self.take_out()
        self._unwritten = None
        for full in self._fulls:
            if full.touched:
                full.touched = False
        for memory in self._comes_and_goes:
            memory.release()
        if self._comes_and_goes:
            self._call_fulls(Resting)

    def _call_fulls(self, name: type[Gathered]) -> None:
        for full in self._fulls:
            full.__class__ = name

    def put_in(self) -> None:
        """Let the modules compute with the whole parameters."""
        self._is_in = True
        self.held.add(self.number)
        with without_waiting():
            frozen_alike = list(map(_is_trained, self._params)) == list(map(_is_trained, self._fulls))
        usual = frozen_alike and not self.lent
        for module, attribute, param, full in self._places:
            there = module._parameters
            found = there.get(attribute)
            if found is not param and found is not full:  # by functional_call, say: that is what is to compute
                self._refuse_stranger(found, param)
            elif usual:
                there[attribute] = full
            elif isinstance(param, Sharded):
                full.requires_grad_(param.requires_grad)
                there[attribute] = full
        self._refresh_rnns()

    def _refuse_stranger(self, found: Tensor | None, param: Tensor) -> None:
        if guards.is_trained(found) and torch.is_grad_enabled() and not in_backward():
            assert found is not None
            guards.refuse_stranger(next(tenant.name for tenant in self.tenants if tenant.param is param), found)

    def take_out(self) -> None:
        if self._is_in:
            self._is_in = False
            for module, attribute, param, full in self._places:
                there = module._parameters
                if there.get(attribute) is full:
                    there[attribute] = param
            self._refresh_rnns()

    def _refresh_rnns(self) -> None:
        """Recurrent modules keep a list of their parameters besides."""
        for module in self._rnns:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class Gatherer:
    """What the hooks call: units before and after their forward, and before their backward."""

    def __init__(
        self,
        units: Sequence[GatheredUnit],
        group: Group,
        flush: Callable[[GatheredUnit], None],
        ahead: Ahead = Ahead(),  # noqa: B008  frozen
    ) -> None:
        self.units, self.group, self._flush, self.ahead = units, group, flush, ahead
        self.root = units[0]
        self.forward = Order("forward", group)
        self.backward = Order("backward", group)
        self._nbytes = [sum(memory.nbytes for memory in unit.memories) for unit in units]
        self._task = -1
        self.publishing: Callable[[], bool] = lambda: False
        sharded = [(unit, memory) for unit in units for memory in unit.memories if memory.sharded]
        self.reads = Reads(
            {memory.full.untyped_storage()._cdata: (memory, partial(self.reading, unit)) for unit, memory in sharded}
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
            self.settle()
            self.forward.begin()

    def settle(self) -> None:
        """Nothing stays whole."""
        for unit in self._held():
            unit.outside = False
            unit.computing = 0
            unit.release()

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
        tells = torch.is_grad_enabled() and not self.group.alone and self.reads.begin()
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

    def _begin(self, unit: GatheredUnit, order: Order) -> None:
        """Its turn has come: it is whole from here on, and so is what follows it soon."""
        if self.group.alone:  # nothing comes and goes, in whatever order
            unit.launch()
            return
        goes_back = order is self.backward and unit is not self.root
        if goes_back:
            self._flush_done(unit)  # before the others are waited for: they may wait for these
        with during(order.of(unit)):
            if order.use(unit) and goes_back:
                self._flush_done(unit)  # those that were to come again
            done = [one.number for one in self._done(unit)] if goes_back else []
            coming = order.coming(self.ahead.depth)
            for verb, number in turn(unit.number, coming, self._numbers, done, self._nbytes, self.ahead):
                if verb == "Release":
                    self.units[number].release()
                elif number == unit.number:
                    unit.launch()
                    unit.wait()
                elif not self.publishing():  # its update would keep this one back
                    self.units[number].launch()

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
                self.settle()
            self.forward.end()
        elif not unit.outside and not (recorded and self.forward.last(unit.number)):
            unit.release()
        return outputs

    def joins_backward(self) -> None:
        """Something happens in a pass, perhaps the first of it."""
        task = torch._C._current_graph_task_id()
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
        elif unit.began != torch._C._current_graph_task_id():
            self._begin_backward(unit)
        elif not unit.ready:
            unit.outside = not unit.whole  # it seemed to be done with: once more would be too often
            self._begin_backward(unit)

    def _begin_backward(self, unit: GatheredUnit) -> None:
        self.joins_backward()
        unit.began = self._task
        self._begin(unit, self.backward)

    def _done(self, unit: GatheredUnit) -> list[GatheredUnit]:
        """Autograd goes back through the forward in order: units whose backward began before this one's are done."""
        whole = (one for one in self._held() if one.whole and one is not unit and one is not self.root)
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
        unit.watch()

    def end_backward(self) -> None:
        """The pass is over."""
        for unit in self.units:
            unit.pending = 0
        self.settle()


def _nothing() -> None:
    pass
