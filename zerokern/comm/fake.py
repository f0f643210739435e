"""Ranks that are threads of one process, exchanging through memory: the slow twin of the collectives, and their spec.

Sums are plain loops in the order of the ranks. What must not be touched is looked at again, and what holds nothing to
rely on is filled with NaN, so that a caller who breaks a rule of `Group` hears of it here first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokern.comm.agreement import Board, Disagreement, Interrupted
from zerokern.comm.group import Group, Handle, own
from zerokern.comm.whereabouts import Presence, Waiting
from zerokern.core.errors import CommError, got
from zerokern.kernels.casts import Squares, add_up

__all__ = ["FakeWorld", "lonely"]

LOOK_S = 0.5


class FakeWorld:
    """`size` ranks in threads.

    >>> def total(group):
    ...     x = torch.full((2,), float(group.rank))
    ...     group.all_reduce(x).wait()
    ...     return x.tolist()
    >>> FakeWorld(3).run(total)
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(got("size", size, "a whole number from 1 on"))
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.given: dict[tuple[str, int], dict[int, tuple[str, Tensor]]] = {}
        self.taken: dict[tuple[str, int], int] = {}
        self.failure: str | None = None
        self.tied: list[FakeWorld] = []
        self.store = torch.distributed.HashStore()
        self.groups = [FakeGroup(self, rank) for rank in range(size)]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """fn(group, *args) on every rank; their results, by rank. Raises the error of the rank that failed first."""
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def live(rank: int) -> None:
            try:
                results[rank] = fn(self.groups[rank], *args)
            except BaseException as error:
                errors.append((rank, error))
                self.fail(f"rank {rank} raised {type(error).__name__}: {error}")

        threads = [
            threading.Thread(target=live, args=(r,), name=f"fake rank {r}", daemon=True) for r in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0][1]
        return results

    def fail(self, reason: str) -> None:
        """Ends every wait; the first reason stays."""
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()
        for other in self.tied:
            if other.failure is None:
                other.fail(reason)


class FakeGroup(Group):
    """One thread's rank."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        super().__init__(rank, world.size, torch.device("cpu"), f"fake of {world.size}")
        self._world = world
        self._presence = Presence(f"rank {rank}")
        self._presence.known.update({other: f"rank {other}" for other in range(world.size)})
        self._board = Board(world.store, rank, world.size, world.timeout, self._presence)
        self._presence.join(self._board.ledger, world.store, rank, "fake", list(range(world.size)))

    def follow(self, key: str) -> None:
        self._board.follow(key)

    def tie(self, other: Group) -> None:
        if isinstance(other, FakeGroup):
            self._world.tied.append(other._world)
            other._world.tied.append(self._world)

    def give_up(self, reason: str) -> None:
        self._world.fail(f"rank {self.rank}: {reason}")

    def agree(self, key: str) -> None:
        if not self.alone:
            try:
                self._board.agree(key, lambda: self._world.failure)
            except (Disagreement, Interrupted) as reason:
                self._world.fail(str(reason))
                raise CommError(str(reason), operation="agree", ranks=tuple(range(self.size))) from None

    def _give(self, kind: str, detail: str, tensor: Tensor) -> Waiting:
        """Puts a copy of the tensor where the other ranks find it."""
        waiting = self._board.ledger.begin(kind, detail)
        with self._world.changed:
            self._world.given.setdefault((kind, waiting.count), {})[self.rank] = (waiting.detail, tensor.clone())
            self._world.changed.notify_all()
        return waiting

    def _take(self, waiting: Waiting) -> list[Tensor]:
        """What all ranks gave, by rank."""
        with self._presence.awaiting(waiting, self._board.ledger):
            return self._taken(waiting)

    def _taken(self, waiting: Waiting) -> list[Tensor]:
        world, begun = self._world, time.monotonic()
        with world.changed:
            there = world.given[waiting.kind, waiting.count]
        while True:
            with world.changed:
                if len(there) == self.size:
                    break
                if world.failure:
                    self._raise(waiting, world.failure)
                world.changed.wait(LOOK_S)
                if len(there) == self.size:
                    break
            failure = self._board.look(waiting) if time.monotonic() - begun > LOOK_S else None
            reason = failure.reason if failure else ""
            if not reason and time.monotonic() - begun > world.timeout:
                absent = sorted(set(range(self.size)) - set(there))
                reason = f"ranks {absent} did not take part within {world.timeout:g} s"
            if reason:
                world.fail(reason)
        unlike = {detail for detail, _ in there.values()}
        if len(unlike) > 1:
            says = ", ".join(f"rank {rank}: {detail!r}" for rank, (detail, _) in sorted(there.items()))
            world.fail(f"ranks differ in {waiting.kind} number {waiting.count}: {says}")
            self._raise(waiting, world.failure or "")
        with world.changed:
            self._world.taken[waiting.kind, waiting.count] = taken = (
                world.taken.get((waiting.kind, waiting.count), 0) + 1
            )
            if taken == self.size:
                del world.given[waiting.kind, waiting.count], world.taken[waiting.kind, waiting.count]
        return [there[rank][1] for rank in range(self.size)]

    def _raise(self, waiting: Waiting, reason: str) -> None:
        raise CommError(f"{waiting}: {reason}", operation=waiting.kind, ranks=tuple(range(self.size)))

    def _untouched(self, waiting: Waiting, tensor: Tensor, before: Tensor) -> None:
        if not torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)):
            reason = f"rank {self.rank} changed what it sends before wait()"
            self._world.fail(reason)
            self._raise(waiting, reason)

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        waiting = self._give("reduce_scatter", _detail(bucket), bucket)
        if scratch is not None:
            scratch.fill_(float("nan"))

        def complete() -> None:
            given = self._take(waiting)
            self._untouched(waiting, bucket, given[self.rank])
            total = out.float() if add else None
            for one in given:
                part = own(one, self.rank, self.size).float() * scale
                total = part if total is None else total + part
            if total is not None:
                bucket.fill_(float("nan"))
                out.copy_(total)
            if squares is not None and out.numel():
                add_up(out, [out], add=False, squares=squares)

        return Handle(complete, lambda: self._all_gave(waiting))

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        if shard is not None:
            own(full, self.rank, self.size).copy_(shard)
        return self._spread("all_gather", full)

    def _publish(self, full: Tensor) -> Handle:
        return self._spread("publish", full)

    def _spread(self, kind: str, full: Tensor) -> Handle:
        mine = own(full, self.rank, self.size)
        waiting = self._give(kind, _detail(full), mine)
        if full.is_floating_point():
            for rank in set(range(self.size)) - {self.rank}:
                own(full, rank, self.size).fill_(float("nan"))

        def complete() -> None:
            given = self._take(waiting)
            self._untouched(waiting, mine, given[self.rank])
            for rank, one in enumerate(given):
                own(full, rank, self.size).copy_(one)

        return Handle(complete, lambda: self._all_gave(waiting))

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        if scratch is not None and scratch.is_floating_point():
            scratch.fill_(float("nan"))
        waiting = self._give("all_reduce", f"{op} of {_detail(tensor)}", tensor)

        def complete() -> None:
            given = self._take(waiting)
            self._untouched(waiting, tensor, given[self.rank])
            wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            total = given[0].to(wide)
            for one in given[1:]:
                total = total + one.to(wide) if op == "sum" else torch.maximum(total, one.to(wide))
            tensor.copy_(total)

        return Handle(complete, lambda: self._all_gave(waiting))

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        waiting = self._give("broadcast", f"{_detail(tensor)} from rank {src}", tensor)
        return Handle(lambda: _fill(tensor, self._take(waiting)[src]), lambda: self._all_gave(waiting))

    def _all_gave(self, waiting: Waiting) -> bool:
        with self._world.changed:
            given = self._world.given.get((waiting.kind, waiting.count))  # nothing: everybody has taken it
            return given is None or len(given) == self.size


class Lonely(Group):
    """A rank of a world that is not there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, torch.device("cpu"), f"rank {rank} of {size}, alone")

    def _refuse(self, operation: str) -> Any:
        raise CommError(
            f"{operation} was asked of a group that only knows its rank and size, {self.rank} of {self.size}: it "
            "serves plans; pass a DeviceMesh, or nothing, for one that communicates",
            operation=operation,
        )

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        return self._refuse("reduce_scatter")

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        return self._refuse("all_gather")

    def _publish(self, full: Tensor) -> Handle:
        return self._refuse("publish")

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        return self._refuse("all_reduce")

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        return self._refuse("broadcast")

    def agree(self, key: str) -> None:
        self._refuse("agree")


def lonely(rank: int, size: int) -> Group:
    """A group that knows its rank and size and refuses to communicate: for plans of worlds that are not here.

    >>> lonely(7, 1024)
    Lonely('rank 7 of 1024, alone', rank 7 of 1024, cpu)
    >>> lonely(7, 1024).barrier()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    zerokern.core.errors.CommError: all_gather was asked of a group that only knows its rank and size, 7 of 1024...
    """
    for name, value, least in (("size", size, 1), ("rank", rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(got(name, value, f"a whole number from {least} on"))
    if rank >= size:
        raise ValueError(got("rank", rank, f"0 to {size - 1}"))
    return Lonely(rank, size)


def _detail(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _fill(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
