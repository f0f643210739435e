"""One unit at stage 3: its buckets, whole while it computes, and what its modules have registered meanwhile."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Handle, during
from zerokern.core.errors import IoError
from zerokern.zero import guards, hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.computing import be_gathered, be_resting
from zerokern.zero.hooks import in_backward
from zerokern.zero.params import BucketMemory, Tenant
from zerokern.zero.shard import shard_of
from zerokern.zero.sharded import Sharded
from zerokern.zero.units import Unit

__all__ = ["GatheredUnit", "Place"]

Place = tuple[dict[str, Any], str]
"""The parameters of a module by name, and one of these names."""

_version_of = operator.attrgetter("_version")
_is_trained = operator.attrgetter("requires_grad")
_is_gathered = operator.attrgetter("gathered")


class GatheredUnit:
    """The buckets of a unit, and the places in modules where its parameters are registered."""

    def __init__(
        self, number: int, unit: Unit, memories: Sequence[BucketMemory], owners: dict[int, list[Place]]
    ) -> None:
        self.number, self.name, self.memories = number, unit.name, memories
        self.called = f"unit {self.name!r}" if self.name else "the root"
        self._module, self._modules = id(unit.module), {id(module) for module in unit.module.modules()}
        self.tenants = [tenant for memory in memories for tenant in memory.tenants]
        self._params = [tenant.param for tenant in self.tenants]
        self._fulls = [tenant.full for tenant in self.tenants if tenant.full is not None]
        pairs = zip(self._fulls, self._params, strict=True)
        self._places = [(*place, param, full) for full, param in pairs for place in owners[id(param)]]
        self._comes_and_goes = [memory for memory in memories if memory.sharded]
        self.computing = 0  # forwards of this unit that are running
        self.pending = 0  # forwards whose backward has not begun
        self.began = -1  # the pass in which its backward last did
        self.outside = False  # used by others in this pass
        self.lent = 0  # parameters that are whole in the user's objects, and need no gathering
        self.apart = 0  # forwards that are running with nothing else
        self.held: set[int] = set()  # units that something has been done with since they were last released
        self._is_in = False
        tables = {id(table) for table, *_ in self._places}
        rnns = [one for one in unit.module.modules() if isinstance(one, nn.RNNBase) and id(one._parameters) in tables]
        self._rnns = list(map(weakref.ref, rnns))
        self._pieces = [home.piece for tenant in self.tenants if (home := shard_of(tenant.param)) is not None]
        self._versions = list(map(_version_of, self._pieces))
        self._handles: list[Handle] = []
        self._coming: list[BucketMemory] = []  # from where they rest, and computed with as they are
        self._unwritten: list[int] | None = None  # versions of what is whole, while somebody may write to it
        if not self.whole:
            be_resting(self._fulls)
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

    def fetch(self) -> None:
        """What it is gathered from is on its way to where that can be done."""
        self.prepare()
        if not self.whole:
            self.held.add(self.number)
            for memory in self._comes_and_goes:
                memory.fetch()

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
                        self._gather(memory)
            if kept:  # whoever did may read it without a word
                self.wait()

    def _gather(self, memory: BucketMemory) -> None:
        if memory.shard is memory.own:
            self._coming.append(memory)
            return
        if memory.lift is None or not memory.group.alone:
            self._wait_for(memory)
        self._handles.append(memory.gather())

    def _wait_for(self, memory: BucketMemory) -> None:
        """The shard is here. Where it cannot be fetched, nobody can gather it: the others hear why, and not of us."""
        if memory.rest is None:
            return
        try:
            memory.rest.wait()
        except Exception as error:
            if self.called not in str(error):
                error.args = (f"{self.called} cannot be fetched: {error}",)
            memory.group.fail(str(error))
            raise
        if memory.recorder is not None:
            memory.recorder.fetched()

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
            self._unwritten = list(map(_version_of, self._fulls))

    def keep_writes(self) -> None:
        """What was written to whole parameters since `watch` is to last: each rank keeps its span of what it wrote."""
        before, self._unwritten = self._unwritten, None
        if before is None:
            return
        now = list(map(_version_of, self._fulls))
        if now != before:
            with torch.no_grad():
                for tenant, piece, was, found in zip(self.tenants, self._pieces, before, now, strict=True):
                    if was != found:
                        self._keep(tenant, piece)
            self._versions = list(map(_version_of, self._pieces))

    @staticmethod
    def _keep(tenant: Tenant, piece: Tensor) -> None:
        home, full = shard_of(tenant.param), tenant.full
        assert home is not None and full is not None
        written = home.here.cut(full).to(piece.device)
        with nullcontext() if home.rest is None else home.rest.used():
            if home.rest is not None:
                home.rest.change()
            if written.data_ptr() == piece.data_ptr():  # one rank: it is there already
                torch.autograd.graph.increment_version(piece)
            elif not torch.equal(written, piece):
                piece.copy_(written)

    @property
    def ready(self) -> bool:
        return self.whole and not self._handles and not self._coming

    def wait(self) -> None:
        if self._handles or self._coming:
            with hooks.outside_of_transforms():
                while self._handles:  # where one fails, it does so again for whoever asks again
                    self._arrive(self._handles[0])
                    self._handles.pop(0)
                while self._coming:
                    self._wait_for(self._coming[-1])  # where it fails, it does so again for whoever asks again
                    self._coming.pop()
            for memory in self._comes_and_goes:
                if memory.shard is not memory.own:
                    memory.let_go()
            be_gathered(self._fulls)

    def settle(self) -> None:
        """Returns once nothing is on its way from where it rests, so that it may be written there."""
        for memory in self._comes_and_goes:
            memory.settle()

    def _arrive(self, handle: Handle) -> None:
        try:
            handle.wait()
        except IoError as error:
            if self.called not in str(error):
                error.args = (f"{self.called} cannot be fetched: {error}",)
            raise

    def release(self) -> None:
        self._coming.clear()
        if any(memory.lift is not None for memory in self._comes_and_goes):  # nobody need hear of it any more
            handles, self._handles = self._handles, []
            for handle in handles:
                with contextlib.suppress(IoError):
                    handle.wait()
        self.wait()
        self.take_out()
        self._unwritten = None
        for memory in self._comes_and_goes:
            memory.release()
        if self._comes_and_goes:
            be_resting(self._fulls)
        self.held.discard(self.number)  # last: where Ctrl-C has broken this off, it is done again

    def put_in(self) -> None:
        """Let the modules compute with the whole parameters."""
        self._is_in = True
        self.held.add(self.number)
        with without_waiting():
            frozen_alike = list(map(_is_trained, self._params)) == list(map(_is_trained, self._fulls))
        usual = frozen_alike and not self.lent
        for there, attribute, param, full in self._places:
            found = there.get(attribute)
            if found is not param and found is not full:  # by functional_call, say: that is what is to compute
                self._refuse_stranger(found, param)
            elif usual:
                there[attribute] = full
            elif isinstance(param, Sharded):
                if not in_backward():  # there what arrives of a frozen one is dropped, and that is noted
                    full.requires_grad_(param.requires_grad)
                there[attribute] = full
        self._refresh_rnns()

    def _refuse_stranger(self, found: Tensor | None, param: Tensor) -> None:
        if guards.is_trained(found) and torch.is_grad_enabled() and not in_backward():
            assert found is not None
            guards.refuse_stranger(next(tenant.name for tenant in self.tenants if tenant.param is param), found)

    def take_out(self) -> None:
        if self._is_in:
            for there, attribute, param, full in self._places:
                if there.get(attribute) is full:
                    there[attribute] = param
            self._refresh_rnns()
            self._is_in = False

    def _refresh_rnns(self) -> None:
        """Recurrent modules keep a list of their parameters besides."""
        for module in filter(None, [reference() for reference in self._rnns]):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _nothing() -> None:
    pass
