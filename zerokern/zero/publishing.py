"""Buckets whose update is under way: a forward waits for those that it needs, and for no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from zerokern.comm import Handle, during
from zerokern.core.errors import StateError
from zerokern.zero import hooks
from zerokern.zero.awaited import arrived, awaited, without_waiting
from zerokern.zero.gather import Gatherer
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.params import BucketMemory
from zerokern.zero.shard import shard_of
from zerokern.zero.units import Unit

__all__ = ["Publication", "Publisher"]

_WRITTEN = (
    "{name!r} was written while its update was under way, and the two cannot be told apart any more; load the model, "
    'then its optimizer. With schedule="overlap", call opt.flush() after step() and before writing to parameters'
)


class Publication:
    """What one optimizer step has yet to publish of a model. `ready(i)` returns once bucket i is there on this rank.

    Nothing here talks to other ranks: one of them may save its model while the others go on.
    """

    def __init__(self, memories: Sequence[BucketMemory], ready: Callable[[int], None]) -> None:
        self._memories, self._ready = list(memories), ready
        self._next = 0
        self._params = [[tenant.param for tenant in memory.tenants] for memory in self._memories]
        self._versions = [[param._version for param in params] for params in self._params]
        for params in self._params:
            awaited(params)

    @property
    def complete(self) -> bool:
        return self._next == len(self._memories)

    def upto(self, last: int) -> None:
        """Returns once all buckets up to this one are those of the last step."""
        while self._next <= min(last, len(self._memories) - 1):
            memory = self._memories[self._next]
            self._ready(self._next)
            with without_waiting():
                self._refuse_writes(memory)
            arrived(self._params[self._next])
            self._next += 1

    def finish(self) -> None:
        self.upto(len(self._memories))

    def end(self) -> None:
        """Nobody need wait any more, whatever has become of it."""
        for params in self._params[self._next :]:
            arrived(params)

    def _refuse_writes(self, memory: BucketMemory) -> None:
        for tenant, version in zip(memory.tenants, self._versions[self._next], strict=True):
            if tenant.param._version != version:
                for number in range(self._next, len(self._memories)):
                    self._ready(number)  # nothing is written any more when this is heard of
                raise StateError(_WRITTEN.format(name=tenant.name))


class Publisher:
    """How updated buckets of one model reach whoever reads its parameters. `gathers`: by a collective, if at all.

    Parameters are then whole on every rank between steps, and updated in part on each.
    """

    def __init__(self, units: Sequence[Unit], memories: Sequence[BucketMemory], *, gathers: bool) -> None:
        self._modules = [weakref.ref(unit.module) for unit in units]
        self._memories = [memory for memory in memories if memory.bucket.trainable]
        self.gathers = gathers and any(not memory.group.alone for memory in memories)
        self.gatherer: Gatherer | None = None
        self.gradient_buckets: Sequence[GradientBucket] = ()
        self._publication: Publication | None = None
        self._hooked = False
        tenants = [tenant for memory in self._memories for tenant in memory.tenants]
        self._read = [one.param if one.full is None else one.full for one in tenants]
        homes = [shard_of(one) for one in self._read]
        self._pieces = [home.piece for home in homes if home is not None]
        self._announced = [piece._version for piece in self._pieces]
        self._tears: Callable[[], object] = _nothing
        self.failure: Exception | None = None  # of an update, while other ranks may wait for this one; see `finish`
        numbers = [number for number, unit in enumerate(units) for _ in unit.params]
        self._last_of = [-1] * len(units)  # of the buckets that are trained, the last that a unit has parameters in
        for number, memory in enumerate(self._memories):
            for spot in memory.bucket.places:
                self._last_of[numbers[spot.param]] = number

    def announce(self) -> None:
        """Graphs that read old values of what was updated must not be used any more: autograd compares versions."""
        versions = [piece._version for piece in self._pieces]
        known, self._announced = self._announced, versions
        updated = [one for one, was, now in zip(self._read, known, versions, strict=True) if was != now]
        torch.autograd.graph.increment_version(updated)

    def gather_all(self) -> None:
        if self.gathers:
            handles = []
            for memory in self._memories:
                handle, recorder = self.launch_gather(memory), memory.recorder
                size = memory.group.size
                handles.append(handle if recorder is None else recorder.sent("Gather", memory.nbytes, size, handle))
            for handle in handles:
                handle.wait()

    def launch_gather(self, memory: BucketMemory) -> Handle:
        """Send this rank's span of a bucket to all, between the other collectives of this thread."""
        with during("", of=f"updated parameters from {memory.called} on"):
            return memory.group.all_gather(memory.full)

    def gather(self, number: int) -> Handle:
        """Send this rank's span of a bucket to all: from any thread, all ranks in one order."""
        memory = self._memories[number]
        with during("an update", of=f"updated parameters from {memory.called} on"):
            return memory.group.publish(memory.full)

    def sent_nbytes(self, number: int) -> int:
        """What `gather` sends from here; never nothing, by which a program would tell that there is no gather."""
        memory = self._memories[number]
        return max(1, memory.nbytes // memory.group.size * (memory.group.size - 1))

    def prepare(self) -> None:
        """An update is about to be under way, of which `begin` tells: no other thread publishes in this group."""
        self.finish()
        for group in {id(memory.group): memory.group for memory in self._memories if self.gathers}.values():
            group.wait_for_publications(besides=self)
            group.publishing.add(self)

    def begin(self, ready: Callable[[int], None], tears: Callable[[], object]) -> None:
        """An update is under way: `ready(i)` returns once bucket i has it, and is whole. `tears` is called where it
        cannot be published.

        `upto(0)` comes next: modules that belong to no unit have no forward that would wait.
        """
        if not self._hooked:
            self._hooked = True
            self._hook()
        self._publication = Publication(self._memories, ready)
        self._tears, self.failure = tears, None

    def _hook(self) -> None:
        """Once an optimizer leaves updates under way: who needs parameters waits for them."""
        settle = self.settle
        for bucket in self.gradient_buckets:
            bucket.settles(settle)
        if self.gatherer is None:
            for number, reference in enumerate(self._modules[1:], 1):
                module = reference()
                if module is not None:
                    hooks.wrap_forward(module, partial(hooks.weakly(self._before_forward), number), _unchanged)
            return
        self.gatherer.publishing = hooks.weakly(self._unfinished)
        for number, gathered in enumerate(self.gatherer.units):
            gathered.prepare = partial(hooks.weakly(self._before_forward), number)

    def _before_forward(self, number: int, *_: Any) -> None:
        self._wait(lambda publication: publication.upto(self._last_of[number]))

    def _unfinished(self) -> bool:
        return self._publication is not None and not self._publication.complete

    def upto(self, unit: int) -> None:
        """Returns once a unit's parameters are those of the last step on this rank."""
        self._wait(lambda publication: publication.upto(self._last_of[unit]))

    @property
    def settle(self) -> Callable[[], None]:
        """`finish`, for tensors, which must not keep their model."""
        return partial(_finish, weakref.ref(self))

    def arrive(self, number: int) -> None:
        """Returns once the trained bucket of this number is that of the last step on this rank."""
        self._wait(lambda publication: publication.upto(number))

    def finish(self) -> None:
        """Returns once all parameters are those of the last step on this rank, and what was written to them since.

        Raises, once, why the update failed that made them.
        """
        self.complete()
        error, self.failure = self.failure, None
        if error is not None:
            raise error

    def complete(self) -> None:
        """As `finish`, and raises nothing of an update that failed: other ranks wait for what this one does next."""
        if self.gatherer is not None:
            self.gatherer.keep_writes()
        self._wait(Publication.finish)
        self.retire()

    def retire(self) -> None:
        """Nothing of this step is left, nor of the optimizer that made it."""
        if self._publication is not None:
            self._publication.end()
        self._publication, self._tears = None, _nothing
        for memory in self._memories:
            memory.group.publishing.discard(self)

    def _wait(self, wait: Callable[[Publication], None]) -> None:
        publication = self._publication
        if publication is not None:
            try:
                self._wait_within(publication, wait)
            except Exception:
                self._tears()
                self.retire()  # told once; what can still be done is to load a checkpoint
                raise

    def _wait_within(self, publication: Publication, wait: Callable[[Publication], None]) -> None:
        with ExitStack() as stack:
            if self.gathers and not publication.complete:
                for group in {id(memory.group): memory.group for memory in self._memories}.values():
                    stack.enter_context(group.awaiting_update())
            wait(publication)


def _finish(publisher: weakref.ref[Publisher]) -> None:
    there = publisher()
    if there is not None:
        there.finish()


def _unchanged(result: Any) -> None:
    pass


def _nothing() -> None:
    pass
