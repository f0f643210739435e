"""Ranks in two dimensions: spans are sharded along one, and replicated along the other (HSDP).

A bucket is reduced in two rounds: to spans along the shard dimension, then each span along the replicate dimension,
beside the first round of the next bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from zerokern.comm.group import Group, Handle, own_span
from zerokern.core.units import scratch_numel
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares
from zerokern.memory.staging import cuda_driver, stream_gate

__all__ = ["AllReplicas", "GroupsInTurn", "HybridGroup"]


class GroupsInTurn:
    """Several groups as one. Collectives run along one after the other, so that every rank gets the same bits."""

    groups: Sequence[Any]

    def join(self) -> list[Group]:
        """Returns the groups."""
        return [group for part in self.groups for group in part.join()]

    def follow(self, key: str) -> None:
        """Does `Group.follow` on all groups."""
        for group in self.groups:
            group.follow(key)

    def agree(self, key: str) -> None:
        """Does `Group.agree` on all groups."""
        for group in self.groups:
            group.agree(key)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, scratch: Tensor | None = None) -> Handle:
        """Does `Group.all_reduce` over all groups; a mean is the mean of means."""
        handle = Handle()
        for group in self.groups:
            handle.wait()
            handle = group.all_reduce(tensor, op, scratch=scratch)
        return handle


class AllReplicas(GroupsInTurn):
    """The ranks of both dimensions, numbered as in a mesh of (replicate, shard)."""

    def __init__(self, shard: Group, replicas: Group) -> None:
        self._shard, self._replicas = shard, replicas
        self.groups = [group for group in (shard, replicas) if not group.alone]
        self.rank, self.size = replicas.rank * shard.size + shard.rank, replicas.size * shard.size
        self.device, self.alone = shard.device, False

    def broadcast(self, tensor: Tensor) -> Handle:
        """Does `Group.broadcast` from the first of all ranks."""
        self._shard.broadcast(tensor).wait()
        return self._replicas.broadcast(tensor)

    def exchange(self, value: Any) -> list[Any]:
        """Does `Group.exchange` over both dimensions."""
        return [item for row in self._replicas.exchange(self._shard.exchange(value)) for item in row]

    def scratch_numel(self, numel: int) -> tuple[int, int]:
        """Returns the scratch memory of an `all_reduce`, as `Group.scratch_numel`."""
        return max(scratch_numel(numel, 1, group.size)[1] for group in self.groups), 0


class HybridGroup(Group):
    """The ranks that shard spans, as a group; each of them knows the `replicas` of its own shard.

    Gathers, and their order, concern only the ranks of one replica. What all ranks must have alike concerns both
    dimensions: `reduce_scatter` ends in the same span on all replicas, a norm counts each span once.

    >>> import torch
    >>> alone = Group(0, 1, torch.device("cpu"), "alone")
    >>> HybridGroup(alone, alone)
    HybridGroup('alone, 1 times', rank 0 of 1, cpu)
    """

    def __init__(self, shard: Group, replicas: Group) -> None:
        super().__init__(shard.rank, shard.size, shard.device, f"{shard.name}, {replicas.size} times")
        self.shard, self.replicas = shard, replicas
        self.alone = shard.alone
        self.traffic, self.publishing, self.exchanging = shard.traffic, shard.publishing, shard.exchanging
        self._everyone = AllReplicas(shard, replicas)
        self._driver = cuda_driver(shard.device) if shard.device.type == "cuda" else None
        shard.link_failures(replicas)

    @property
    def everyone(self) -> Any:
        return self._everyone

    def join(self) -> list[Group]:
        return self._everyone.join()

    def awaiting_update(self) -> AbstractContextManager[None]:
        return self.shard.awaiting_update()

    def wait_for_publications(self, besides: object = None) -> None:
        self.shard.wait_for_publications(besides)
        self.replicas.wait_for_publications(besides)

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, scratch: Tensor | None = None) -> Handle:
        """Reduces over all shards, each counted once: a sum is the mean of the replicas' sums.

        If replicas are equal that is the sum of each; if not, all get the same number.
        """
        if op == "sum" and not tensor.is_floating_point():
            raise TypeError(f"tensor has dtype {tensor.dtype}; allowed: floats, of which replicas have a mean")
        handle = self._everyone.all_reduce(tensor, op, scratch=scratch)
        if op != "sum":
            return handle

        def complete() -> None:
            handle.wait()
            self._flat("tensor", tensor).div_(self.replicas.size)

        return Handle(complete)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle:
        """Broadcasts from rank `src` of the first replica to all ranks of all replicas."""
        self.shard.broadcast(tensor, src).wait()
        return self.replicas.broadcast(tensor)

    def follow(self, key: str) -> None:
        self.shard.follow(key)

    def agree(self, key: str) -> None:
        self.shard.agree(key)

    def fail(self, reason: str) -> None:
        self.shard.fail(reason)
        self.replicas.fail(reason)

    def scratch_numel(self, numel: int) -> tuple[int, int]:
        return scratch_numel(numel, self.size, self.replicas.size)

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        # what is added to must not be added up with that of the replicas: the sum is made in the bucket
        piece = own_span(bucket, self.rank, self.size) if add or out.dtype != bucket.dtype else out
        op, first_scale = "sum", scale
        if scale == 1.0 / self._everyone.size and self.shard.averages(bucket) and self.replicas.averages(bucket):
            op, first_scale = "mean", 1.0 / self.size
        head, tail = self._divided(scratch, bucket.numel())
        first = self.shard._reduce_scatter(bucket, piece, first_scale, False, head, None)

        def begin() -> Handle:
            return self.replicas.all_reduce(piece, op, scratch=tail)

        def finish() -> None:
            if piece is not out and out.numel():
                add_up(out, [piece], add=add, squares=squares)

        if self._driver is None:
            return _Rounds(first, begin, finish)
        with self._driver.aside("reduce"):  # one round after the other, beside what the program launches next
            first.wait()
            begin().wait()
            finish()
            gate = stream_gate(self.device)
        held = [bucket, piece, out]

        def complete() -> None:
            gate()
            held.clear()  # not before the current stream follows: what is freed may be written by it at once

        return Handle(complete, None, gate)

    def _divided(self, scratch: Tensor | None, numel: int) -> tuple[Tensor | None, Tensor | None]:
        """Divides scratch memory: the second round uses the end, which the next bucket's first round leaves alone."""
        head, tail = self.scratch_numel(numel)
        if scratch is None or scratch.numel() < head + tail:
            return scratch, None
        return scratch[:head], scratch[scratch.numel() - tail :]

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        return self.shard._all_gather(full, shard)

    def _publish(self, full: Tensor) -> Handle:
        return self.shard._publish(full)

    def _all_to_all(self, receives: list[Tensor], sends: list[Tensor]) -> Handle:
        return self.shard._all_to_all(receives, sends)


class _Rounds(Handle):
    """A collective with a second round, which starts when somebody waits or calls `advance`."""

    __slots__ = ("_begin", "_finish", "_first", "_second")

    def __init__(self, first: Handle, begin: Callable[[], Handle], finish: Callable[[], None]) -> None:
        super().__init__(self._both)
        self._first, self._begin, self._finish = first, begin, finish
        self._second: Handle | None = None

    def advance(self) -> bool:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._ended:
                try:
                    self._go_on()
                except Exception as error:  # not Ctrl-C, after which it goes on
                    self._failure, self._ended, self._complete = error, True, None
                    raise
            return not self._ended

    def _go_on(self) -> Handle:
        if self._second is None:
            self._first.wait()
            self._second = self._begin()
        return self._second

    def _both(self) -> None:
        self._go_on().wait()
        self._finish()
