"""Reduces gradient buckets during a backward pass, in one order on all ranks.

A bucket is launched when all its gradients have arrived, and those before it in the order have been launched. The order
is that in which rank 0's buckets became complete in its first pass; at stage 3, where ranks that wait for a reduction
keep the others from gathering, that of the units' turns, and what has not arrived by then is left out. Buffers are a
constant number: a launch waits for the reduction that holds the one it needs.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter

import torch
from torch import Tensor

from zerokern.comm import Handle, during
from zerokern.core.errors import StateError
from zerokern.core.units import BUFFERS
from zerokern.kernels.triton.backend import capturing
from zerokern.kernels.triton.upload import upload
from zerokern.memory.addresses import TensorBodies
from zerokern.memory.interrupts import whole
from zerokern.schedule.ranges import named
from zerokern.zero import checks, hooks
from zerokern.zero.gradients import WAITING, GradientBucket
from zerokern.zero.kinds import without_waiting
from zerokern.zero.runner import UnitRunner
from zerokern.zero.units import RankGroups

__all__ = ["Reduction"]

BACKWARD = "a backward pass"
_times_shown, _pieces_of = attrgetter("shown.times_made"), attrgetter("shown.pieces")
# of a parameter's gradient in one pass: it came in time to be reduced with its bucket, or after that
ARRIVED, AFTER_LAUNCH = 1, 2
_FIRST_IN_GRAPH = (
    "the first backward pass of a sharded model cannot go into a CUDA graph: ranks agree in it on the order of "
    "buckets, which the host waits for; train at least one whole step before the capture begins"
)
_OTHERS_IN_GRAPH = (
    "a backward pass that is captured brought other gradients than those before it, and which of them other ranks have "
    "the host would wait for: a CUDA graph has no room for that; before the capture begins, train one step in which "
    "gradients come to the same parameters, on all ranks"
)
_COMPILED = (
    "torch's compiled autograd runs this backward pass, and zk.shard would receive no gradient of it; allowed: "
    "torch.compile(model) with torch._dynamo.config.compiled_autograd = False, and backward() outside of "
    "torch._dynamo.compiled_autograd and of compiled functions"
)
_SUMS_IN_GRAPH = (
    "passes under no_sync() were made outside of a CUDA graph, and this one goes into it, or the other way round: the "
    "buffers that they add up in come and go; capture all micro-batches of a step, or none"
)


class Reduction:
    """Decides when each gradient bucket of one model is launched, and ends the pass."""

    def __init__(
        self, buckets: Sequence[GradientBucket], parts: Sequence[RankGroups], model_is_there: Callable[[], object]
    ) -> None:
        """`parts`: the ranks that divide buckets, by the number that a bucket has of theirs; the model's first."""
        self.buckets, self._parts, self._model_is_there = buckets, parts, model_is_there
        self.group = parts[0].group
        self._on_host = self.group.device.type == "cpu"
        # whether the transport leaves it to us to sum what other ranks send
        needs_scratch = self._on_host and not all(part.group.everyone.alone for part in parts)
        self.memory = SharedMemory(buckets, needs_scratch=needs_scratch)
        self.factor = PendingFactor(buckets)
        self.synchronizes = True
        self.passes = 0  # that have reduced
        self._task = hooks.NO_PASS  # the pass that runs
        self._watch: object = None  # hears when the pass breaks off
        self._in_graph = False  # whether the pass goes into a CUDA graph
        self.turns: UnitRunner | None = None  # at stage 3 units decide
        self._order = LaunchOrder(buckets)
        ends = list(accumulate(len(one.entries) for one in buckets))
        self._slices = list(map(slice, [0, *ends], ends))  # of each bucket, in what is of all parameters
        self._params = TensorBodies([param for one in buckets for param in one.inbox.params])
        self._leaves = self._params  # of autograd
        if not all(one.inbox.lands_in_params for one in buckets):
            self._leaves = TensorBodies([leaf for one in buckets for leaf in one.inbox.leaves])
        self._trained: Sequence[int] = []  # whether parameters were, when the pass began
        self._said: dict[tuple[int, bytes], bytearray] = {}  # by ranks and what arrived here: what all ranks said last
        self._frozen: dict[int, list[str]] = {}  # names of those that were frozen in the last pass, by part
        self._shows_none = False  # whether parameters had no `.grad` when the pass began
        self._shown: tuple[list[int], array[int]] = [], array("Q")  # how often each bucket made what it shows; these
        # of all ranks that any group has, where there are several
        self._learns_order = (parts[0].hearing if len(parts) == 1 else parts[0].everyone).size > 1
        for bucket in buckets:
            bucket.shown.receive = partial(hooks.weakly(self.received), bucket.number)
        # called as a pass begins, for gradients are coming: once, or for as long as they return True
        self.expecting: list[Callable[[], object]] = []

    @property
    def active(self) -> bool:
        """Whether a pass runs, or has broken off."""
        return self._task != hooks.NO_PASS

    def shown_spans(self) -> list[Tensor] | None:
        """Returns this rank's spans of all gradients, bucket after bucket; None if a parameter shows another one."""
        times = list(map(_times_shown, self.buckets))
        if self._shown[0] != times:
            self._shown = times, array("Q", [shown._cdata for bucket in self.buckets for shown in bucket.shown.tensors])
        as_reduced = not any(bucket.replicated or bucket.shown.exposed or bucket.local for bucket in self.buckets)
        if not as_reduced or not all(times) or not self._params.have_gradients(self._shown[1]):
            return None
        return list(chain.from_iterable(map(_pieces_of, self.buckets)))

    def gradient_arrived(self, number: int, place: int) -> None:
        """Called for a gradient in `.grad` that the inbox does not note by itself: the first, the last, a large one."""
        bucket = self.buckets[number]
        self.joins_backward(bucket, place)
        soon = self._may_be_launched(bucket)  # else a buffer would be taken for the rest of the pass
        at_once = (soon and not bucket.inbox.waits[place]) or hooks.is_within_pass()
        if at_once:
            self._open(bucket)
        bucket.take_arrived(place, at_once=at_once)
        if bucket.inbox.is_full and soon:
            self._complete(bucket)

    def take_from_other_leaf(self, bucket: GradientBucket, place: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
        """Takes a gradient of another leaf than the one modules compute with; autograd accumulates nothing."""
        if grads[0] is not None:
            self.joins_backward()
            bucket.take_from_other_leaf(place, grads[0])
        return (None,)

    def received(self, number: int, place: int, grad: Tensor) -> None:
        """Takes a gradient that autograd adds to a shown `.grad`: the first of a pass without a forward."""
        bucket = self.buckets[number]
        self.joins_backward(bucket, place)
        self._open(bucket)
        bucket.receive_one(place, grad)

    def absent(self, bucket: GradientBucket, place: int) -> None:
        """Notes that no gradient will arrive at this place in this pass."""
        self.joins_backward()
        bucket.inbox.absent.add(place)
        bucket.inbox.arrivals.task = hooks.NO_PASS  # fewer complete it than are expected
        if bucket.inbox.is_full and self._may_be_launched(bucket):
            self._complete(bucket)

    def _broken(self, task: int) -> None:
        """Restores `.grad` after an error in the pass, but in buckets that were reduced by then.

        Once. `abandon` does the rest, where ranks are in step.
        """
        if self._task == task:
            with whole("what a backward pass has left"):
                for bucket in self.buckets:
                    bucket.inbox.break_off()

    def joins_backward(self, bucket: GradientBucket | None = None, place: int = 0) -> None:
        """Begins a pass, unless it has begun; the gradient of `place` may have arrived already."""
        if self._task != hooks.current_pass():
            self._begin(bucket, place)

    def add(self, bucket: GradientBucket, place: int, grad: Tensor) -> None:
        """Adds a part of a gradient, of some rows of the batch; the last part arrives through autograd."""
        self._open(bucket)
        bucket.add(place, grad)

    def _begin(self, first: GradientBucket | None, place: int) -> None:
        if self._model_is_there() is None:  # a graph outlived it
            hooks.refuse_gradients()
        if hooks.in_compiled_backward():
            raise StateError(_COMPILED)
        expecting, self.expecting = self.expecting, []
        for hear in expecting:
            hear()
        if self.active:
            raise StateError(
                "a backward pass began while another one had not ended. Within it: checkpoint(use_reentrant=True) is "
                "not possible under zk.shard, use_reentrant=False is. After one that broke off: run a forward first"
            )
        for part in self._parts:
            part.group.wait_for_publications()
        in_graph = capturing(self.group.device)
        if in_graph is not self._in_graph and any(bucket.local for bucket in self.buckets):
            raise StateError(_SUMS_IN_GRAPH)
        self._in_graph = in_graph
        takes_turns = self.turns is not None and self.turns.takes_turns
        if in_graph and self._learns_order and not (takes_turns and self.passes):
            raise StateError(_FIRST_IN_GRAPH)
        with without_waiting():
            self._shows_none = self._params.have_gradients()
        dropped = self._shows_none and not any(bucket.shown.exposed for bucket in self.buckets)
        self.factor.begin(dropped=dropped, in_graph=in_graph)
        if first is not None:
            checks.mixed(first, place, scaled=self.factor.scales)
        self.factor.settle()
        # what an interrupt leaves, at whatever line it comes, is put back by `_broken` from here on
        task = hooks.current_pass()
        self._watch = hooks.at_end_of_backward(self._finish, partial(hooks.weakly(self._broken), task))
        self._task = task
        self._order.begin(by_unit=takes_turns)
        with without_waiting():  # what is asked here of parameters are no values
            self._trained = trained = self._params.trained()
            trains = trained if self._leaves is self._params else self._leaves.trained()
            for bucket, some in zip(self.buckets, self._slices, strict=True):
                noted = task if trained[some] == trains[some] else hooks.NO_PASS
                arrived = place if bucket is first else None
                bucket.inbox.begin(noted, sum(trained[some]), arrived, shows_none=self._shows_none)

    def flush(self, buckets: Sequence[GradientBucket]) -> None:
        """Completes these buckets: their unit's backward is over."""
        if self.active:
            for bucket in buckets:
                self._complete(bucket)

    def _may_be_launched(self, bucket: GradientBucket) -> bool:
        """Whether a bucket goes when it is full: at stage 3 where ranks that lack a gradient of it send it too, before
        they wait for others. Else these would wait for its buffer, and it for their part of the next unit."""
        if not self._order.by_unit:
            return True
        assert self.turns is not None
        return self.turns.is_over_next(bucket.memory.bucket.unit)

    def _complete(self, bucket: GradientBucket) -> None:
        for one in self._order.completed(bucket):
            self._launch(one)

    def _open(self, bucket: GradientBucket) -> None:
        """Gives a bucket a buffer, unless it has one in this pass."""
        if bucket.phase != WAITING:
            return
        bucket.spare_kept_gradients()
        borrows = self.synchronizes and bucket.lends_buffer and bucket.buffer is None
        bucket.open(self.memory.lend(bucket) if borrows else bucket.whole_buffer())

    def _launch(self, bucket: GradientBucket) -> None:
        self._open(bucket)
        assert bucket.buffer is not None
        bucket.close(reduces=self.synchronizes)
        if not self.synchronizes:
            return
        scratch = self.memory.scratch_for(bucket)
        of = bucket.called + ", added to those of an earlier pass" if bucket.shown.held else bucket.called
        with during(BACKWARD, of=of), named("reduce", bucket.memory.label):
            handle = bucket.reduce(bucket.buffer, scratch)
        if (recorder := bucket.memory.recorder) is not None:
            handle = recorder.sent("Reduce", bucket.nbytes, bucket.group.size, handle, 2 if bucket.replicated else 1)
        if handle is None:
            bucket.tell()
        else:
            self.memory.outstanding.append((bucket, handle))

    def _finish(self) -> None:
        """Ends the pass: reduces what is left, and shows gradients where any rank had one."""
        if self._order.by_unit:
            assert self.turns is not None
            self.turns.collect_rest()
        for bucket in self._order.left():
            self._complete(bucket)
        with without_waiting():
            empty = self._shows_none and self._params.have_gradients()
            if not (empty and (self._leaves is self._params or self._leaves.have_gradients())):
                for bucket in self.buckets:
                    bucket.take_written()
        marks = bytearray().join(map(_marks, self.buckets))
        if self.synchronizes:
            marks = self._heard(marks)
        while self.memory.outstanding:
            self.memory.wait_for_oldest()
        given: list[Sequence[int]] = []
        for bucket, some in zip(self.buckets, self._slices, strict=True):
            mine = marks[some]
            if AFTER_LAUNCH in mine:
                bucket.reduce_after_launch(self.memory.scratch_for(bucket))
            given.append([place for place, mark in enumerate(mine) if mark] if 0 in mine else range(len(mine)))
        for bucket in self.buckets:
            if bucket.shown.exposed:  # optimizers that know nothing of copies read these
                bucket.shown.land()
        with without_waiting():
            for bucket, places in zip(self.buckets, given, strict=True):
                bucket.inbox.put_back()
                if self.synchronizes:
                    bucket.shown.held.update(places)  # first: what is shown and not held would be written over
                bucket.give(places)
        self.passes += self.synchronizes
        if self._learns_order and self.synchronizes and not self._order.by_unit:
            self._learn_order()
        self._reset()
        for bucket, places in zip(self.buckets, given, strict=True) if self.synchronizes else ():
            bucket.call_hooks(places)

    def _heard(self, marks: bytearray) -> bytearray:
        """Returns the marks of all ranks that have the bucket."""
        hearing = [(number, part) for number, part in enumerate(self._parts) if part.hearing.size > 1]
        places = [(bucket, place) for bucket in self.buckets for place in range(len(bucket.entries)) if hearing]
        for number, part in hearing:
            mine = [at for at, (bucket, _) in enumerate(places) if bucket.memory.bucket.ranks == number]
            if mine:
                lacks = [at for at in mine if not marks[at]]
                frozen = [places[at][0].entries[places[at][1]].name for at in lacks if not self._trained[at]]
                asks = any(self._trained[at] and not _shows_anyway(*places[at]) for at in lacks)
                given = bytearray(marks[at] for at in mine)
                if not capturing(self.group.device):
                    found = self._said[number, bytes(given)] = self._agreed(part, given, frozen, asks=asks)
                elif (said := self._said.get((number, bytes(given)))) is not None:
                    found = said  # a replay asks nobody
                else:
                    self.abandon()  # what was launched is joined, as a capture demands
                    raise StateError(_OTHERS_IN_GRAPH)
                for place, mark in zip(mine, found, strict=True):
                    marks[place] = mark
        return marks

    def _agreed(self, part: RankGroups, marks: bytearray, frozen: Sequence[str], *, asks: bool) -> bytearray:
        """Returns what arrived of each parameter on any rank; on a device only ranks that ask wait for it.

        `.grad` of a trained parameter that shows nothing says whether any rank had one. Those that are `frozen` here
        show none; that all ranks freeze the same is agreed on, without the device, when another set of them is.
        """
        hearing, late = part.hearing, AFTER_LAUNCH in marks
        if not self._on_host:  # where some do not wait for what the others say, all must say the same of this
            said = ["late gradients"] if late else []
            if frozen != self._frozen.get(id(part), []):
                told = f"{', '.join(frozen[:3]) or 'none'}; crc {zlib.crc32(' '.join(frozen).encode()):08x}"
                alike = "parameters frozen on this rank, as they must be on all ranks alike"
                said.append(f"{len(frozen)} {alike} ({told})")
            hearing.agree("; ".join(said)) if said else hearing.follow("no late gradients, and none frozen or thawed")
            self._frozen[id(part)] = list(frozen)
        there = self._marks_there(marks)
        with during(BACKWARD, of="which gradients there are"):
            hearing.follow(BACKWARD)
            handle = hearing.all_reduce(there, "max")
            if self._on_host or late or asks:
                handle.wait()
                return bytearray(there.tolist()[: len(marks)])
        return marks

    def _marks_there(self, marks: bytearray) -> Tensor:
        """Returns the marks where ranks compare them, as whole words."""
        if self._on_host:
            return torch.frombuffer(marks, dtype=torch.uint8)
        words = marks + bytes(-len(marks) % 8)
        if marks.count(ARRIVED) == len(marks):
            return torch.ones(len(words), dtype=torch.uint8, device=self.group.device)
        return upload(torch.frombuffer(words, dtype=torch.uint8), self.group.device)

    def _learn_order(self) -> None:
        order = torch.tensor(list(self._order.complete), dtype=torch.int64, device=self.group.device)
        with during(BACKWARD, of="the order of buckets"):
            if len(self._parts) == 1:
                self.group.broadcast(order).wait()
            else:  # each group's first rank need not be the same
                order.mul_(self._parts[0].is_first)
                self._parts[0].everyone.all_reduce(order, "max").wait()
        self._order.numbers, self._learns_order = order.tolist(), False

    def abandon(self) -> None:
        """Forgets a pass that broke off; waits for what is under way, so that the ranks stay in step."""
        self.drop_leftovers()
        if self.active:
            if self._in_graph and not capturing(self.group.device):
                self.memory.outstanding.clear()  # they went with the graph
            while self.memory.outstanding:
                self.memory.wait_for_oldest()
            for bucket in self.buckets:
                bucket.reducer.end()
            self._reset()

    def drop_leftovers(self) -> None:
        """Drops gradients that lie in hidden leaves between passes: one that broke off has left them, in its first."""
        if self._leaves is self._params or self.active:
            return
        with without_waiting():
            if not self._leaves.have_gradients():
                for leaf in (leaf for bucket in self.buckets for leaf in bucket.inbox.leaves):
                    leaf.grad = None

    def _reset(self) -> None:
        for bucket in self.buckets:
            self.memory.take_back(bucket)
            bucket.reset()
        self._task, self._watch = hooks.NO_PASS, None


class LaunchOrder:
    """The order in which the buckets of one model are launched, each once it is complete.

    `numbers`: of the buckets; until they are learned, in the order in which backward comes to the first parameter of
    each. At stage 3 that of the units' turns comes first.
    """

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self._buckets = buckets
        firsts = [min((place.param for place in one.memory.bucket.places), default=-1) for one in buckets]
        self.numbers = sorted(range(len(buckets)), key=lambda number: (-firsts[number], -number))
        self._of_unit: dict[int, list[int]] = {}
        for number in self.numbers:
            self._of_unit.setdefault(buckets[number].memory.bucket.unit, []).append(number)
        self.by_unit = False
        self._queue: deque[int] = deque()  # of buckets that are launched next
        self._queued: set[int] = set()  # in this pass
        self.complete: dict[int, None] = {}  # in the order in which they became so

    def begin(self, *, by_unit: bool) -> None:
        """Begins a pass. `by_unit`: units say when."""
        self.by_unit = by_unit
        self._queue.clear()
        self._queued.clear()
        self.complete.clear()
        if not by_unit:
            self._line_up(self.numbers)

    def completed(self, bucket: GradientBucket) -> Iterator[GradientBucket]:
        """Notes that a bucket is complete; yields those that are launched now."""
        if bucket.number in self.complete:
            return
        self.complete[bucket.number] = None
        if bucket.number not in self._queued:
            self._line_up(self._of_unit[bucket.memory.bucket.unit])
        while self._queue and self._queue[0] in self.complete:
            yield self._buckets[self._queue.popleft()]

    def left(self) -> list[GradientBucket]:
        """Returns what has yet to be launched in this pass, in order."""
        self._line_up(self.numbers)
        return [self._buckets[number] for number in self._queue]

    def _line_up(self, numbers: Sequence[int]) -> None:
        new = [number for number in numbers if number not in self._queued]
        self._queue.extend(new)
        self._queued.update(new)


class SharedMemory:
    """Memory that the buckets of one model use in turns while they are reduced: a constant number of buffers, and
    scratch for what other ranks send, where the transport does not sum.

    Who asks for memory waits for the reduction that holds it.
    """

    def __init__(self, buckets: Sequence[GradientBucket], *, needs_scratch: bool) -> None:
        self._buckets, self.needs_scratch = buckets, needs_scratch
        self.outstanding: deque[tuple[GradientBucket, Handle]] = deque()
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self.scratch: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers, in use or not."""
        return [*self._free, *self._lent.values()]

    def lend(self, bucket: GradientBucket) -> Tensor:
        """Returns a buffer for a bucket, until `take_back`."""
        self._lent[bucket.number] = lent = self._take(bucket.nbytes)
        return lent.view(bucket.dtype)[: bucket.memory.bucket.padded_numel]

    def take_back(self, bucket: GradientBucket) -> None:
        """Takes back what was lent to a bucket, if anything was."""
        lent = self._lent.pop(bucket.number, None)
        if lent is not None:
            bucket.buffer = None
            self._free.append(lent)

    def _take(self, nbytes: int) -> Tensor:
        """Takes a buffer with room for so much; of equal ones in turns, so that a bucket meets its own again."""
        while not (fitting := [(one.nbytes, place) for place, one in enumerate(self._free) if one.nbytes >= nbytes]):
            if len(self.buffers) < BUFFERS or not self.outstanding:
                sizes = [bucket.nbytes for bucket in self._buckets]
                if any(one.memory.bucket.whole for one in self._buckets):  # matrices of many layers: these are larger
                    sizes = [size for size in sizes if size <= 2 * nbytes]
                return self._bytes(max(sizes))
            self.wait_for_oldest()
        return self._free.pop(min(fitting)[1])

    def _bytes(self, nbytes: int) -> Tensor:
        return self._buckets[0].memory.pool.zeros(nbytes, torch.uint8)

    def scratch_for(self, bucket: GradientBucket) -> Tensor | None:
        """Returns scratch memory, once the last reduction has left it or gone on to its second round; None if none is
        needed."""
        if not self.needs_scratch:
            return None
        while len(self.outstanding) > 1:
            self.wait_for_oldest()
        if self.outstanding:
            oldest, handle = self.outstanding[0]
            with during(BACKWARD):
                goes_on = handle.advance()
            if not goes_on:
                self.wait_for_oldest()
            elif not oldest.adds:  # else it goes on in the buffer
                self.take_back(oldest)
        if not self.scratch:
            wanted = [one.reducer.scratch_nbytes(one.memory.bucket.padded_numel, one.dtype) for one in self._buckets]
            first, second = zip(*wanted, strict=True)
            self.scratch.append(self._bytes(max(first) + max(second)))
        return self.scratch[0].view(bucket.dtype)

    def wait_for_oldest(self) -> None:
        """Waits for the reduction that was launched first."""
        bucket, handle = self.outstanding[0]
        with during(BACKWARD):
            try:
                handle.wait()
            finally:
                self.outstanding.popleft()  # not before: where Ctrl-C has come before the wait, `abandon` waits
        self.take_back(bucket)
        bucket.tell()


class PendingFactor:
    """What clipping leaves to be multiplied into one model's gradients, by whoever uses them next.

    `pending`: of what is reduced. `applied`: by updates since, and not to the gradients themselves; what is accumulated
    on is multiplied by it first.
    """

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self._buckets = buckets
        self.pending: float | Tensor = 1.0
        self.applied: float | Tensor = 1.0
        self._read_in_graphs: list[float | Tensor] = []  # which replays read

    @property
    def scales(self) -> bool:
        """Whether gradients have yet to be multiplied by anything."""
        return _scales(self.pending * self.applied)

    def begin(self, *, dropped: bool, in_graph: bool) -> None:
        """Begins a pass. `dropped`: nobody has kept a gradient; `in_graph`: it is captured, with what was left here."""
        if dropped:
            self.pending = self.applied = 1.0
        elif in_graph:
            self._read_in_graphs += [self.pending, self.applied]
        self.pending = _of_a_step(self.pending)

    def fold(self, factor: float | Tensor) -> None:
        """Leaves a factor pending, which whoever uses the gradients next applies."""
        self.pending = self.pending * factor
        self._settle_before_writes(factor)

    def folded(self, factor: float | Tensor) -> None:
        """Notes that an update has applied a factor, and not to the gradients themselves."""
        self.applied = self.applied * _of_a_step(factor)
        self._settle_before_writes(factor)

    def _settle_before_writes(self, factor: float | Tensor) -> None:
        """Whoever writes to a gradient from here on writes to what was clipped."""
        for bucket in self._buckets if _scales(factor) else ():
            bucket.shown.reads_until(hooks.weakly(self.settle))

    def take(self) -> float | Tensor:
        """Takes the pending factor, which the caller applies. Those that updates have applied go into the gradients."""
        pending, self.pending = self.pending, 1.0
        self.settle()
        return pending

    def settle(self) -> None:
        """Multiplies the gradients by the pending factor, and by the one that updates applied."""
        factor, self.pending, self.applied = self.pending * self.applied, 1.0, 1.0
        for bucket in self._buckets if _scales(factor) else ():
            bucket.scale(factor)


def _scales(factor: float | Tensor) -> bool:
    return isinstance(factor, Tensor) or factor != 1.0


def _of_a_step(factor: float | Tensor) -> float | Tensor:
    """Returns the factor, or 1 for NaN, which only skips the step that was to follow."""
    if isinstance(factor, Tensor):
        return torch.nan_to_num(factor, nan=1.0)
    return factor if factor == factor else 1.0


def _shows_anyway(bucket: GradientBucket, place: int) -> bool:
    """Whether `.grad` shows what is reduced, as an earlier pass left it, also if no rank had one in this pass."""
    return place in bucket.shown.held and not bucket.shards[place].has_hooks


def _marks(bucket: GradientBucket) -> bytearray:
    """Returns what arrived of a bucket in this pass, by place."""
    inbox = bucket.inbox
    if len(inbox.arrived) == len(inbox.leaves):
        found = bytearray((ARRIVED,)) * len(inbox.leaves)
    else:
        found = bytearray(len(inbox.leaves))
        for place in inbox.arrived:
            found[place] = ARRIVED
    for place in bucket.places_after_launch:
        found[place] = AFTER_LAUNCH
    return found
