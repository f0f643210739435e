"""Publishes updated parameters: at once, or bucket by bucket while an update is under way.

A forward then waits for the buckets that it needs, and for no others. Whatever else reads or writes a parameter waits
for the bucket of that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.comm import Group, Handle, during
from zerokern.core.errors import StateError
from zerokern.zero import hooks
from zerokern.zero.changed_spans import ChangedSpan, Take
from zerokern.zero.kinds import Distributed, without_waiting
from zerokern.zero.params import BucketMemory
from zerokern.zero.shard import shard_of
from zerokern.zero.sharded import leaves
from zerokern.zero.sharded_ops import METADATA
from zerokern.zero.units import UnitSpec
from zerokern.zero.watch import Watch, counting

__all__ = ["Publisher", "mark_updated", "mark_updating"]

_ASKS_NO_VALUES = METADATA - {torch.Tensor.__format__, torch.Tensor.contiguous}
_WRITTEN = (
    "{name!r} was written while its update was under way, and the two cannot be told apart any more; load the model, "
    'then its optimizer. With schedule="overlap", call opt.flush() after step() and before writing to parameters'
)


class _Updating:
    """The class of a parameter during its update: functions that are given it wait for that. Its memory is the same."""

    __slots__ = ()

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: Any = kwargs or {}
        found = () if func in _ASKS_NO_VALUES else [one for one in leaves((args, given)) if isinstance(one, _Updating)]
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        for one in found:
            _wait_for(one)
        return func(*args, **given)

    def __deepcopy__(self, memo: dict) -> Any:
        _wait_for(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)


class UpdatingParameter(_Updating, nn.Parameter):
    """A plain parameter while its update is under way; before and after it is of torch's own class."""


class UpdatingDTensor(_Updating, Distributed):
    """A DTensor while its update is under way."""


_UPDATING: dict[type, type] = {nn.Parameter: UpdatingParameter, Distributed: UpdatingDTensor}
_UPDATED: dict[type, type] = {updating: usual for usual, updating in _UPDATING.items()}


def _wait_for(param: Any) -> None:
    shard = shard_of(param)
    if shard is not None:
        shard.sharding.publisher.wait_for_bucket(shard.gradients.number)
    mark_updated([param])


def mark_updating(params: Sequence[Tensor]) -> None:
    """Makes whoever reads one of these parameters wait for its update."""
    for param in params:
        param.__class__ = _UPDATING.get(type(param), type(param))


def mark_updated(params: Sequence[Tensor]) -> None:
    """Makes nobody wait for these parameters any more: they are updated, or never will be."""
    for param in params:
        if isinstance(param, _Updating):
            param.__class__ = _UPDATED[type(param)]


class Publisher:
    """Shows updated buckets of one model to whoever reads its parameters.

    `by_gather`: each rank updates a part of parameters that all have, and a collective sends it to the others. Waiting
    for an update talks to no other rank: one rank may save its model while the others go on.
    """

    def __init__(
        self, units: Sequence[UnitSpec], memories: Sequence[BucketMemory], *, by_gather: bool, by_changes: bool = False
    ) -> None:
        """`by_changes`: ranks send what an update has changed, where that is less than all."""
        self._memories = [memory for memory in memories if memory.bucket.trainable]
        self._by_gather = by_gather
        self._groups: dict[int, Group] = {id(one.group): one.group for one in self._memories if self.gathers(one)}
        self.keep_writes: Callable[[], None] = _nothing  # copies writes to full parameters into the shards of stage 3
        self.failure: Exception | None = None  # of an update, while other ranks may wait for this one; see `finish`
        entries = [entry for memory in self._memories for entry in memory.entries]
        read = [one.leaf for one in entries]
        self._read = Watch(read, versions=False, memory=False)
        shards = [shard_of(one) for one in read]
        self._pieces = Watch((shard.piece for shard in shards if shard is not None), memory=False)
        self._spans: dict[int, ChangedSpan] = {}
        for memory in filter(self.gathers, self._memories) if by_changes else ():
            homes = [shard for entry in memory.entries if (shard := shard_of(entry.param)) is not None]
            self._spans[id(memory)] = ChangedSpan(memory, homes)
        # of the update that is under way, if any
        self._ready: Callable[[int], None] | None = None
        self._tears: Callable[[], object] = _nothing
        self._next = 0  # the first bucket that nobody has waited for
        self._params = [Watch((e.param for e in memory.entries), memory=False) for memory in self._memories]
        numbers = [number for number, unit in enumerate(units) for _ in unit.params]
        self._last_of = [-1] * len(units)  # of the buckets that are trained, the last that a unit has parameters in
        for number, memory in enumerate(self._memories):
            for spot in memory.bucket.places:
                self._last_of[numbers[spot.param]] = number

    @property
    def spans(self) -> Iterable[ChangedSpan]:
        """Those of buckets that are sent as what has changed."""
        return self._spans.values()

    def gathers(self, memory: BucketMemory) -> bool:
        """Whether an update of this bucket ends with an all-gather."""
        return self._by_gather and memory.bucket.trainable and not memory.group.alone

    def announce(self) -> None:
        """Count updates as writes to what autograd has read: it refuses graphs of older values."""
        with counting([span.writes for span in self.spans]):
            self._read.count_writes(self._pieces.written(accept=True))

    def gather_all(self, among: Callable[[BucketMemory], bool] | None = None, take: Take | None = None) -> None:
        """Gather all buckets, where ranks updated a part each, and wait for them. `among`: no others.

        `take`: gives up the bits of what has changed of a piece since it was last published; None: nobody knows.
        """
        handles = []
        for memory in filter(among, filter(self.gathers, self._memories)):
            handle, recorder = self.launch_gather(memory, take), memory.recorder
            size = memory.group.size
            handles.append(handle if recorder is None else recorder.sent("Gather", memory.nbytes, size, handle))
        for handle in handles:
            handle.wait()

    def send_all(self) -> None:
        """Has the next publication send all: somebody has written what no version counts."""
        for span in self.spans:
            span.writes.places.add(0)

    def launch_gather(self, memory: BucketMemory, take: Take | None = None) -> Handle:
        """Send this rank's span of a bucket to all, between the other collectives of this thread."""
        with during("", of=f"updated parameters from {memory.called} on"):
            send, span = memory.group.all_gather, self._spans.get(id(memory))
            return send(memory.full) if span is None else span.gather(send, take)

    def gather(self, number: int, take: Take | None = None) -> Handle:
        """Send this rank's span of a bucket to all: from any thread, all ranks in one order."""
        memory = self._memories[number]
        with during("an update", of=f"updated parameters from {memory.called} on"):
            send, span = memory.group.publish, self._spans.get(id(memory))
            return send(memory.full) if span is None else span.gather(send, take)

    def prepare(self) -> None:
        """Finish the last update; `begin` tells of the next one. No other thread publishes in this group meanwhile."""
        self.finish()
        for group in self._groups.values():
            group.wait_for_publications(besides=self)
            group.publishing.add(self)
        for span in self.spans:  # `announce` may come after the first gather
            span.writes.note()

    def begin(self, ready: Callable[[int], None], tears: Callable[[], object]) -> None:
        """Show an update that is under way: `ready(i)` returns once bucket i has it, `tears` is called if it fails.

        `upto(0)` comes next: modules that belong to no unit have no forward that would wait.
        """
        self._ready, self._tears, self._next, self.failure = ready, tears, 0, None
        for params in self._params:
            params.accept_writes()
        for params in self._params:
            mark_updating(params.tensors)

    def is_updating(self) -> bool:
        """Whether an update is under way."""
        return self._ready is not None and self._next < len(self._memories)

    def upto(self, unit: int, *_: Any) -> None:
        """Wait until a unit's parameters are those of the last step on this rank."""
        self.wait_for_bucket(self._last_of[unit])

    @property
    def settle(self) -> Callable[[], None]:
        """`finish`, for tensors, which must not keep their model."""
        return hooks.weakly(self.finish)

    def finish(self) -> None:
        """Wait until all parameters are those of the last step on this rank, and what was written to them since.

        Raises, once, why the update failed that made them.
        """
        self.complete()
        error, self.failure = self.failure, None
        if error is not None:
            raise error

    def complete(self) -> None:
        """As `finish`, but says nothing of an update that failed: other ranks wait for what this one does next."""
        self.keep_writes()
        self.wait_for_bucket(len(self._memories))
        self.retire()

    def retire(self) -> None:
        """Forget the update that is under way, and the optimizer that made it."""
        for params in self._params[self._next :] if self._ready is not None else ():
            mark_updated(params.tensors)
        self._ready, self._tears = None, _nothing
        for group in self._groups.values():  # no other one has been told
            group.publishing.discard(self)

    def wait_for_bucket(self, last: int) -> None:
        """Wait until all trained buckets up to this one are those of the last step on this rank."""
        if self._ready is None:
            return
        try:
            with ExitStack() as stack:
                for group in self._groups.values() if self.is_updating() else ():
                    stack.enter_context(group.awaiting_update())
                while self._next <= min(last, len(self._memories) - 1):
                    self._ready(self._next)
                    with without_waiting():
                        self._refuse_writes()
                    mark_updated(self._params[self._next].tensors)
                    self._next += 1
        except Exception:
            self._tears()
            self.retire()  # told once; what can still be done is to load a checkpoint
            raise

    def _refuse_writes(self) -> None:
        assert self._ready is not None
        written = self._params[self._next].written()
        if written:
            for number in range(self._next, len(self._memories)):
                self._ready(number)  # nothing is written any more when this is heard of
            raise StateError(_WRITTEN.format(name=self._memories[self._next].entries[written[0]].name))


def _nothing() -> None:
    pass
