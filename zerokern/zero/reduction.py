"""From the first gradient of a backward pass to the last: which bucket is reduced when, in one order on all ranks.

A bucket is launched when all its gradients have arrived, and those before it in the order have been launched. The order
is that in which rank 0's buckets became complete in its first pass. Buffers are a constant number: a launch waits for
the reduction that holds the one it needs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import Handle, during
from zerokern.core.errors import StateError
from zerokern.core.units import BUFFERS
from zerokern.zero import hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.groups import RankGroups

__all__ = ["Reduction"]

BACKWARD = "a backward pass"
ARRIVED, LATE = 1, 2  # of a parameter's gradient, in one pass: in time to be reduced with its bucket, or after that


class Reduction:
    """The gradients of one model."""

    def __init__(
        self, buckets: Sequence[GradientBucket], parts: Sequence[RankGroups], model_is_there: Callable[[], object]
    ) -> None:
        """`parts`: the ranks that divide buckets, by the number that a bucket has of theirs; the model's first."""
        self.buckets, self._parts, self._model_is_there = buckets, parts, model_is_there
        self.group = parts[0].group
        self.synchronizes = True
        self.active = False
        self.passes = 0  # that have reduced
        self._task = -1
        self._order = list(reversed(range(len(buckets))))
        # those whose order is one: where several groups reduce, all ranks that any of them has
        self._everyone = parts[0].hearing if len(parts) == 1 else parts[0].everyone
        self._learns_order = self._everyone.size > 1
        self._completed: dict[int, None] = {}  # in the order in which they became complete
        self._next = 0
        self._outstanding: deque[tuple[GradientBucket, Handle]] = deque()
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self._pooled = 0
        self.scratch: list[Tensor] = []
        for bucket in buckets:
            bucket.receive = partial(_received, weakref.ref(self), bucket.number)
        self.factor: float | Tensor = 1.0  # that clipping has left pending, of what is reduced
        self.applied: float | Tensor = 1.0  # by updates since; what is accumulated on is multiplied by it first

    @property
    def buffers(self) -> list[Tensor]:
        """The shared buffers, wherever they are."""
        return [*self._free, *self._lent.values()]

    def landed(self, bucket: GradientBucket, place: int) -> None:
        """Autograd has accumulated a gradient that the inbox does not take: the first, the last, a large one."""
        self.joins_backward(bucket, place)
        at_once = not bucket.waits[place] or hooks.is_within_pass()
        if at_once and not bucket.opened:
            self._open(bucket)
        bucket.land(place, at_once=at_once)
        self._complete_if_full(bucket)

    def handed(self, bucket: GradientBucket, place: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
        """Autograd hands over a gradient of a leaf besides the usual one; nothing is left to accumulate."""
        if grads[0] is not None:
            self.joins_backward()
            bucket.hand_over(place, grads[0])
        return (None,)

    def received(self, bucket: GradientBucket, place: int, grad: Tensor) -> None:
        """Autograd adds a gradient to what `.grad` shows: the first of a pass that nobody has seen begin."""
        self.joins_backward(bucket, place)
        if not bucket.opened:
            self._open(bucket)
        bucket.receive_one(place, grad)

    def absent(self, bucket: GradientBucket, place: int) -> None:
        """In this pass nothing arrives there."""
        self.joins_backward()
        bucket.absent.add(place)
        bucket.inbox.task = hooks.NO_PASS  # fewer complete it than are expected
        self._complete_if_full(bucket)

    def _broken(self, task: int) -> None:
        """An error has ended the pass: `.grad` is what it was, but in buckets that were reduced by then; `abandon` does
        the rest, where ranks are in step."""
        for bucket in self.buckets if self.active and self._task == task else ():
            bucket.put_back()

    def _complete_if_full(self, bucket: GradientBucket) -> None:
        there = bucket.arrived | bucket.absent if bucket.absent else bucket.arrived
        if bucket.inbox.expected <= len(there):
            self._complete(bucket)

    def joins_backward(self, bucket: GradientBucket | None = None, place: int = 0) -> None:
        """Gradients come in this pass, the first perhaps in one within it; that of a place may have landed."""
        if not self.active or self._task != hooks.current_pass():
            self._begin(bucket, place)

    def add(self, bucket: GradientBucket, place: int, grad: Tensor) -> None:
        """A part of a gradient, of some rows of the batch; the last part arrives by autograd, and counts for all."""
        if not bucket.opened:
            self._open(bucket)
        bucket.add(place, grad)

    def _begin(self, first: GradientBucket | None, place: int) -> None:
        if self._model_is_there() is None:  # a graph outlived it
            raise StateError("these are gradients of a sharded model that is gone; keep the model until its backward")
        if self.active:
            raise StateError(
                "a backward pass began while another one had not ended. Within it: checkpoint(use_reentrant=True) is "
                "not possible under zk.shard, use_reentrant=False is. After one that broke off: run a forward first"
            )
        for part in self._parts:
            part.group.wait_for_publications()
        self.factor = _of_a_step(self.factor)
        if first is not None:
            factor = self.factor * self.applied
            first.refuse_mixed(place, scaled=isinstance(factor, Tensor) or factor != 1.0)
        self.settle()
        self.active, self._task = True, hooks.current_pass()
        self._next = 0
        self._completed.clear()
        with without_waiting():  # what is asked here of parameters are no values
            for bucket in self.buckets:
                bucket.begin(self._task, place if bucket is first else None)
        hooks.at_end_of_backward(self._finish, partial(self._broken, self._task))

    def is_applied(self, factor: float | Tensor) -> None:
        """An update has applied a factor, and not to the gradients themselves."""
        self.applied = self.applied * _of_a_step(factor)

    def settle(self) -> None:
        """Apply the pending factor, and the one that updates applied, to the gradients themselves."""
        factor, self.factor, self.applied = self.factor * self.applied, 1.0, 1.0
        if isinstance(factor, Tensor) or factor != 1.0:
            for bucket in self.buckets:
                bucket.scale(factor)

    def flush(self, buckets: Sequence[GradientBucket]) -> None:
        """No more gradients of these will arrive: their unit's backward is over."""
        if self.active:
            for bucket in buckets:
                self._complete(bucket)

    def _complete(self, bucket: GradientBucket) -> None:
        number = bucket.number
        if number in self._completed:
            return
        self._completed[number] = None
        while self._next < len(self._order) and self._order[self._next] in self._completed:
            self._launch(self.buckets[self._order[self._next]])
            self._next += 1

    def _open(self, bucket: GradientBucket) -> None:
        """Find a buffer for what arrives."""
        bucket.spare_what_is_kept()
        if bucket.buffer is not None:
            bucket.open(bucket.buffer)
        elif self.synchronizes and bucket.lends_buffer:
            self._lent[bucket.number] = self._take()
            bucket.open(self._lent[bucket.number].view(bucket.dtype)[: bucket.bucket.padded_numel])
        else:
            bucket.open(bucket.whole_buffer())

    def _launch(self, bucket: GradientBucket) -> None:
        if not bucket.opened:
            self._open(bucket)
        assert bucket.buffer is not None
        adds = bucket.close(reduces=self.synchronizes)
        # what only passes under no_sync brought is reduced with this one
        bucket.arrived_places = tuple(bucket.arrived | bucket.local)
        bucket.arrived.clear()
        if not self.synchronizes:
            return
        if self._needs_scratch:
            self._make_way()
        more = ", added to those of an earlier pass" if bucket.held else ""
        with during(BACKWARD, of=f"gradients from {bucket.memory.called} on{more}"):
            handle = bucket.reduce(bucket.buffer, adds, self._scratch_for(bucket))
        if (recorder := bucket.memory.recorder) is not None:
            handle = recorder.sent("Reduce", bucket.nbytes, bucket.group.size, handle, 2 if bucket.replicated else 1)
        if handle is None:
            bucket.tell()
        else:
            self._outstanding.append((bucket, handle))

    def _make_way(self) -> None:
        """The last reduction is over, or in its second round, and its first one's scratch is free."""
        while len(self._outstanding) > 1:
            self._wait_for_oldest()
        if self._outstanding:
            bucket, handle = self._outstanding[0]
            with during(BACKWARD):
                goes_on = handle.advance()
            if not goes_on:
                self._wait_for_oldest()
            elif not bucket.adds:  # else it goes on in the buffer
                self._take_back(bucket)

    @property
    def _needs_scratch(self) -> bool:
        on_host = self.group.device.type == "cpu"
        return on_host and not all(part.group.everyone.alone for part in self._parts)

    def _scratch_for(self, bucket: GradientBucket) -> Tensor | None:
        """What the other ranks' spans are received into, where the transport does not add up itself: one for all."""
        if not self._needs_scratch:
            return None
        if not self.scratch:
            wanted = [one.summing.scratch_nbytes(one.bucket.padded_numel, one.dtype) for one in self.buckets]
            first, second = zip(*wanted, strict=True)
            self.scratch.append(self._bytes(max(first) + max(second)))
        return self.scratch[0].view(bucket.dtype)

    def _bytes(self, nbytes: int) -> Tensor:
        return self.buckets[0].memory.pool.zeros(nbytes, torch.uint8)

    def _take(self) -> Tensor:
        while not self._free and self._pooled >= BUFFERS and self._outstanding:
            self._wait_for_oldest()
        if self._free:
            return self._free.pop(0)  # in turns, so that a bucket meets its own again
        self._pooled += 1
        return self._bytes(max(bucket.nbytes for bucket in self.buckets))

    def _wait_for_oldest(self) -> None:
        bucket, handle = self._outstanding.popleft()
        with during(BACKWARD):
            handle.wait()
        self._take_back(bucket)
        bucket.tell()

    def _take_back(self, bucket: GradientBucket) -> None:
        lent = self._lent.pop(bucket.number, None)
        if lent is not None:
            bucket.buffer = None
            self._free.append(lent)

    def _finish(self) -> None:
        """The end of the pass: what is left is reduced, and gradients are shown where any rank had one."""
        for number in self._order:
            self._complete(self.buckets[number])
        with without_waiting():
            for bucket in self.buckets:
                bucket.take_written()
        marks = bytearray().join(map(_marks, self.buckets))
        if self.synchronizes:
            marks = self._heard(marks)
        while self._outstanding:
            self._wait_for_oldest()
        given: list[list[int]] = []
        for bucket, end in zip(self.buckets, accumulate(len(one.tenants) for one in self.buckets), strict=True):
            mine = marks[end - len(bucket.tenants) : end]
            if LATE in mine:
                bucket.reduce_late(self._scratch_for(bucket))
            given.append([place for place, mark in enumerate(mine) if mark])
        self._land()
        with without_waiting():
            for bucket, places in zip(self.buckets, given, strict=True):
                bucket.put_back()
                bucket.give(places)
                if self.synchronizes:
                    bucket.held.update(places)
        self.passes += self.synchronizes
        if self._learns_order and self.synchronizes:
            self._learn_order()
        self._reset()
        for bucket, places in zip(self.buckets, given, strict=True) if self.synchronizes else ():
            bucket.call_hooks(places)

    def _heard(self, marks: bytearray) -> bytearray:
        """The marks of this rank, and of those that divide each bucket."""
        numbers = [bucket.bucket.ranks for bucket in self.buckets for _ in bucket.tenants]
        for number, part in enumerate(self._parts):
            mine = [place for place, one in enumerate(numbers) if one == number]
            if part.hearing.size > 1 and mine:
                found = self._agreed(part.hearing, bytearray(marks[place] for place in mine))
                for place, mark in zip(mine, found, strict=True):
                    marks[place] = mark
        return marks

    def _agreed(self, hearing: Any, marks: bytearray) -> bytearray:
        """What arrived of each parameter on any rank. All ask; on a device only those that lack something wait."""
        on_host = self.group.device.type == "cpu"
        late, usual = LATE in marks, marks.count(ARRIVED) == len(marks)
        if not on_host:  # where some do not wait for what the others say, all must say the same of this
            hearing.agree("late gradients") if late else hearing.follow("no late gradients")
        whole = torch.frombuffer(marks, dtype=torch.uint8)
        # made there, where nothing is missing: a copy from the host would wait for the device
        there = torch.ones_like(whole, device=self.group.device) if usual else whole.to(self.group.device)
        with during(BACKWARD, of="which gradients there are"):
            hearing.follow(BACKWARD)
            handle = hearing.all_reduce(there, "max")
            if on_host or not usual:
                handle.wait()
                return bytearray(there.tolist())
        return marks

    def _land(self) -> None:
        """Returns once what is reduced is where it is shown."""
        for bucket in self.buckets:
            if bucket.landing is not None:
                bucket.landing.wait()

    def _learn_order(self) -> None:
        order = torch.tensor(list(self._completed), dtype=torch.int64, device=self.group.device)
        with during(BACKWARD, of="the order of buckets"):
            if len(self._parts) == 1:
                self.group.broadcast(order).wait()
            else:  # each group's first rank need not be the same
                order.mul_(self._parts[0].is_first)
                self._everyone.all_reduce(order, "max").wait()
        self._order, self._learns_order = order.tolist(), False

    def abandon(self) -> None:
        """A pass broke off: wait for what is under way, so that the ranks stay in step, and forget it."""
        if self.active:
            while self._outstanding:
                self._wait_for_oldest()
            self._land()
            self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            self._take_back(bucket)
            bucket.reset()
        self.active = False


def _received(reduction: weakref.ref[Reduction], number: int, place: int, grad: Tensor) -> None:
    """What a gradient that is shown is told of, which must not keep its model."""
    there = reduction()
    if there is not None:
        there.received(there.buckets[number], place, grad)


def _of_a_step(factor: float | Tensor) -> float | Tensor:
    """The factor, unless it is NaN: that skips the step that was to follow, and is no part of another."""
    if isinstance(factor, Tensor):
        return torch.nan_to_num(factor, nan=1.0)
    return factor if factor == factor else 1.0


def _marks(bucket: GradientBucket) -> bytearray:
    """What arrived of a bucket in this pass, by place."""
    found = bytearray(len(bucket.tenants))
    for place in bucket.arrived_places:
        found[place] = ARRIVED
    for place in bucket.late_places:
        found[place] = LATE
    return found
