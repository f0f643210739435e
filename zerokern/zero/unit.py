"""A unit at stage 3: parameters that are gathered and released together, in a state that has a name.

    SHARDED --unshard--> GATHERING --wait_for_unshard--> WHOLE --collect--> REDUCING --reshard--> SHARDED

`unshard` of what is not sharded does nothing, but that a unit which is REDUCING is WHOLE again: it computes once more.
`reshard` ends every state; a gather that is under way is waited for. All other moves raise.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zerokern.comm import Handle, during
from zerokern.core.errors import IoError, StateError
from zerokern.schedule.ranges import named
from zerokern.zero import hooks
from zerokern.zero.kinds import here_of, present
from zerokern.zero.params import BucketEntry, BucketMemory, mark_gathered, mark_released
from zerokern.zero.registrations import Registration, Registrations
from zerokern.zero.shard import shard_of
from zerokern.zero.units import UnitSpec
from zerokern.zero.watch import Watch

__all__ = ["Unit", "UnitState"]


class UnitState(enum.Enum):
    """Where the parameters of a unit are."""

    SHARDED = "each rank has its span"
    GATHERING = "the full parameters are on their way"
    WHOLE = "modules may compute with the full parameters"
    REDUCING = "its backward is over and its gradients are being reduced; the full parameters are still there"


SHARDED, GATHERING, WHOLE, REDUCING = UnitState


class Unit:
    """The buckets of one unit, their state, and the places in modules where its parameters are registered."""

    #: by verb, the states in which it may be called
    LEGAL: ClassVar[dict[str, tuple[UnitState, ...]]] = {
        "unshard": tuple(UnitState),
        "wait_for_unshard": (GATHERING, WHOLE),
        "collect": (WHOLE,),
        "reshard": tuple(UnitState),
    }

    def __init__(
        self,
        number: int,
        spec: UnitSpec,
        memories: Sequence[BucketMemory],
        places: dict[int, list[Registration]],
        reduce: Callable[[Unit], None],
    ) -> None:
        """`places`: where parameters are registered, by their ids. `reduce`: collects and reduces what has arrived of
        the unit's gradients."""
        self.number, self.name, self.memories, self._reduce = number, spec.name, memories, reduce
        self.called = f"unit {self.name!r}" if self.name else "the root"
        self.state = SHARDED
        self.active: set[int] = set()  # numbers of units, of all of the model, that `reshard` does something for
        self.module, self.modules = id(spec.module), {id(module) for module in spec.module.modules()}
        self.entries = [entry for memory in memories for entry in memory.entries]
        self.registrations = Registrations(spec.module, self.entries, places)
        self.sharded = [memory for memory in memories if memory.sharded]
        # what the runner notes: forwards that are running, those whose backward has not begun (also those whose outputs
        # are gone, for ranks drop theirs at different times), the pass in which one last did, and whether others use
        # the parameters, outside of the unit's modules, in this pass
        self.computing, self.began, self.outside = 0, -1, False
        self.pending: set[Any] = set()
        self.materialized = 0  # parameters that zk.gathered holds in full: they need no gathering
        self.bypassed = 0  # forwards that are running with nothing but these
        self.wait_for_update: Callable[[], None] = _nothing  # returns once the shards are those of the last step
        pieces = [shard.piece for entry in self.entries if (shard := shard_of(entry.param)) is not None]
        self._pieces, self._written = Watch(pieces, memory=False), Watch(self.registrations.fulls, memory=False)
        self._handles: list[Handle] = []
        self._in_place: list[BucketMemory] = []  # on one rank, shards that are fetched and computed with as they are
        self._is_lent = False  # whether somebody may write to the full parameters, which are watched
        if self.sharded:
            mark_released(self._written.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameters."""
        return sum(memory.nbytes for memory in self.memories)

    def encloses(self, other: Unit) -> bool:
        """Whether the other unit's module lies within this one's."""
        return other.module in self.modules

    @property
    def is_sharded(self) -> bool:
        """Whether nothing but this rank's span is there, nor on its way; what has no shards is always whole."""
        return self.state is SHARDED and bool(self.sharded)

    @property
    def is_whole(self) -> bool:
        """Whether the full parameters are there."""
        return self.state is WHOLE or self.state is REDUCING or not self.sharded

    @property
    def is_on_its_way(self) -> bool:
        """Whether the full parameters are there, or being gathered, and the unit does not end its pass."""
        return self.state is GATHERING or self.state is WHOLE

    @property
    def all_materialized(self) -> bool:
        """Whether zk.gathered holds all parameters in full."""
        return self.materialized == len(self.entries)

    def _check(self, verb: str) -> None:
        if self.state not in self.LEGAL[verb]:
            allowed = " or ".join(state.name for state in UnitState if state in self.LEGAL[verb])
            raise StateError(
                f"{verb}() of {self.called}, which is {self.state.name} ({self.state.value}); it must be {allowed}"
            )

    def prefetch(self) -> None:
        """Fetch the shards from where they rest, so that they can be gathered soon."""
        self.wait_for_update()
        if self.is_sharded:
            self.active.add(self.number)
            for memory in self.sharded:
                memory.fetch()

    def unshard(self) -> None:
        """Launch the gathers of the full parameters: SHARDED -> GATHERING."""
        self.active.add(self.number)
        self.wait_for_update()
        if self.state is GATHERING and all(map(_is_gathered, self.sharded)):
            return  # no update has come since that began
        self._count_updates()
        if self.state is WHOLE:
            return
        if self.state is REDUCING or not self.sharded:
            self.state = WHOLE
            return
        self.state = GATHERING
        kept = False
        with during(self.called, of=self.called), hooks.outside_of_transforms(), named("unshard", self.name or "root"):
            for memory in self.sharded:
                if not memory.gathered:  # where one could not be launched, it is tried again
                    kept |= memory.allocate()
                    self._gather(memory)
        if kept:  # somebody holds this memory, and may read it without a call that would wait
            self._wait()  # still GATHERING, as on the other ranks: the order of collectives depends on the state

    def wait_for_unshard(self) -> None:
        """Wait for the gathers: GATHERING -> WHOLE."""
        if self.state is not WHOLE:
            if self.state is not GATHERING:
                self._check("wait_for_unshard")
            if self._handles or self._in_place:
                self._wait()
            self.state = WHOLE

    def collect(self) -> None:
        """Reduce the gradients, for the unit's backward is over: WHOLE -> REDUCING."""
        if self.state is not WHOLE:
            self._check("collect")
        self.state = REDUCING
        self.reduce()

    def reduce(self) -> None:
        """Reduce what has arrived of the gradients, wherever the parameters are."""
        self._reduce(self)

    def reshard(self) -> None:
        """Give back the memory of the full parameters: any state -> SHARDED."""
        if self.number not in self.active:
            return
        if self.computing:
            raise StateError(f"reshard() of {self.called}, which is {self.state.name}, within its forward")
        self._in_place.clear()
        if self._handles and any(memory.disk_copier is not None for memory in self.sharded):
            # nobody needs to hear of a failure any more
            handles, self._handles = self._handles, []
            for handle in handles:
                with contextlib.suppress(IoError):
                    handle.wait()
        if self._handles:
            self._wait()
        self.registrations.register_sharded()
        self._is_lent = False
        for memory in self.sharded:
            memory.release()
        if self.sharded:
            mark_released(self._written.tensors)
        self.state = SHARDED
        self.active.discard(self.number)  # last: where Ctrl-C has broken this off, it is done again

    def _gather(self, memory: BucketMemory) -> None:
        if memory.shard is memory.own:
            self._in_place.append(memory)
            return
        if memory.rest is not None and (memory.disk_copier is None or not memory.group.alone):
            self._wait_for_shard(memory)
        self._handles.append(memory.gather())

    def _wait_for_shard(self, memory: BucketMemory) -> None:
        """Where a shard cannot be fetched, nobody can gather it, and only this rank knows: tell the others why."""
        assert memory.rest is not None
        try:
            memory.rest.wait()
        except Exception as error:
            self._name(error)
            memory.group.fail(str(error))
            raise
        if memory.recorder is not None:
            memory.recorder.fetched()

    def _wait(self) -> None:
        with hooks.outside_of_transforms(), named("wait for", self.name or "root"):
            while self._handles:  # where one fails, it fails again for whoever waits again
                try:
                    self._handles[0].wait()
                except IoError as error:
                    self._name(error)
                    raise
                self._handles.pop(0)
            while self._in_place:
                self._wait_for_shard(self._in_place[-1])
                self._in_place.pop()
        for memory in self.sharded:
            if memory.rest is not None and memory.shard is not memory.own:
                memory.let_go()
        mark_gathered(self._written.tensors)

    def _name(self, error: Exception) -> None:
        if self.called not in str(error):
            error.args = (f"{self.called} cannot be fetched: {error}",)

    def wait_for_copies(self) -> None:
        """Return once no copy reads the shards, so that they may be written."""
        for memory in self.sharded:
            memory.settle()

    def _count_updates(self) -> None:
        """Count updates of the shards as writes to the full parameters: autograd refuses graphs of older values."""
        updated = self._pieces.written(accept=True)
        if updated:
            self._written.count_writes(updated)

    def watch_writes(self) -> None:
        """From here on somebody has the full parameters and may write to them."""
        if not self._is_lent:
            self._written.accept_writes()
            self._is_lent = True

    def keep_writes(self) -> None:
        """Copy what was written to full parameters since `watch_writes` into the shards: each rank its span."""
        was_lent, self._is_lent = self._is_lent, False
        written = self._written.written() if was_lent else []
        if written:
            with torch.no_grad():
                for place in written:
                    self._keep(self.entries[place], self._pieces.tensors[place])
            self._pieces.accept_writes()

    @staticmethod
    def _keep(entry: BucketEntry, piece: Tensor) -> None:
        written = here_of(piece).cut(entry.full).to(piece.device)
        with present(piece, written=True):
            if written.data_ptr() == piece.data_ptr():  # one rank: it is there already
                torch.autograd.graph.increment_version(piece)
            elif not torch.equal(written, piece):
                piece.copy_(written)


_is_gathered = operator.attrgetter("gathered")


def _nothing() -> None:
    pass
