"""Ranks that are threads of one process and exchange through memory: the slow reference of the collectives.

Sums are plain loops in the order of the ranks. It checks that nobody touches memory in use, and fills memory with
undefined content with NaN, so that a caller that breaks a rule of `Group` fails here first.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokern.comm.group import Group, Handle, own_span
from zerokern.comm.operations import Ledger, Operation
from zerokern.core.errors import CommError, got
from zerokern.debug.agreement import Agreement
from zerokern.debug.processes import ProcessState
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares

__all__ = ["FakeWorld"]

LOOK_S = 0.5
_ONE_AT_A_TIME = threading.Lock()
_rng_state = torch.random.get_rng_state


def _rng_state_without_collector() -> Tensor:
    """Returns `torch.random.get_rng_state()`, which locks threads out of each other before Python 3.12.

    torch makes the Python object while it holds the generator's mutex. The collector may run then, and its finalizers
    let other threads in: one that asks for the mutex waits for it for ever, with the GIL.
    """
    with _ONE_AT_A_TIME:
        was = gc.isenabled()
        gc.disable()
        try:
            return _rng_state()
        finally:
            if was:
                gc.enable()


torch.random.get_rng_state = torch.get_rng_state = _rng_state_without_collector  # which each checkpoint asks for


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
        """Runs fn(group, *args) on every rank; returns the results by rank. Raises the error of the first rank that
        failed."""
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
        self._last: dict[Operation, list[Tensor]] = {}  # what the last few brought: a Ctrl-C may come then
        self._process = ProcessState(f"rank {rank}")
        self._process.known.update({other: f"rank {other}" for other in range(world.size)})
        self._agreement = Agreement(world.store, Ledger(rank, world.size), world.timeout, self._process)
        self._process.join(self._agreement.ledger, world.store, rank, "fake", list(range(world.size)))

    def follow(self, key: str) -> None:
        self._agreement.follow(key)

    def link_failures(self, other: Group) -> None:
        if isinstance(other, FakeGroup):
            self._world.tied.append(other._world)
            other._world.tied.append(self._world)

    def fail(self, reason: str) -> None:
        self._world.fail(f"rank {self.rank}: {reason}")

    def agree(self, key: str) -> None:
        if not self.alone:
            try:
                self._agreement.agree(key, lambda: self._world.failure)
            except RuntimeError as reason:
                self._world.fail(str(reason))
                raise CommError(str(reason), operation="agree", ranks=tuple(range(self.size))) from None

    def _give(self, kind: str, detail: str, given: Any) -> Operation:
        """Puts a copy of what is given where the other ranks find it."""
        given = [one.clone() for one in given] if isinstance(given, list) else given.clone()
        operation = self._agreement.ledger.begin(kind, detail)
        with self._world.changed:
            self._world.given.setdefault((kind, operation.count), {})[self.rank] = (operation.detail, given)
            self._world.changed.notify_all()
        return operation

    def _take(self, operation: Operation) -> list[Tensor]:
        """Returns the values that all ranks gave, by rank; once more after a Ctrl-C that came then."""
        if (known := self._last.get(operation)) is not None:  # read once: another thread of this rank may drop it
            return known
        with self._process.waiting(operation, self._agreement.ledger):
            self._last[operation] = taken = self._taken(operation)  # within: Ctrl-C may come when the block ends
        while len(self._last) > 16:
            self._last.pop(next(iter(self._last)), None)
        return taken

    def _taken(self, operation: Operation) -> list[Tensor]:
        world, begun = self._world, time.monotonic()
        with world.changed:
            there = world.given[operation.kind, operation.count]
        while True:
            with world.changed:
                if len(there) == self.size:
                    break
                if world.failure:
                    self._raise(operation, world.failure)
                world.changed.wait(LOOK_S)
                if len(there) == self.size:
                    break
            failure = self._agreement.look(operation) if time.monotonic() - begun > LOOK_S else None
            reason = failure.reason if failure else ""
            if not reason and time.monotonic() - begun > world.timeout:
                absent = sorted(set(range(self.size)) - set(there))
                reason = f"ranks {absent} did not take part within {world.timeout:g} s"
            if reason:
                world.fail(reason)
        unlike = {detail for detail, _ in there.values()}
        if len(unlike) > 1:
            says = ", ".join(f"rank {rank}: {detail!r}" for rank, (detail, _) in sorted(there.items()))
            world.fail(f"ranks differ in {operation.kind} number {operation.count}: {says}")
            self._raise(operation, world.failure or "")
        with world.changed:
            self._world.taken[operation.kind, operation.count] = taken = (
                world.taken.get((operation.kind, operation.count), 0) + 1
            )
            if taken == self.size:
                del world.given[operation.kind, operation.count], world.taken[operation.kind, operation.count]
        return [there[rank][1] for rank in range(self.size)]

    def _raise(self, operation: Operation, reason: str) -> None:
        raise CommError(f"{operation}: {reason}", operation=operation.kind, ranks=tuple(range(self.size)))

    def _untouched(self, operation: Operation, tensor: Tensor, before: Tensor) -> None:
        if not torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)):
            reason = f"rank {self.rank} changed what it sends before wait()"
            self._world.fail(reason)
            self._raise(operation, reason)

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        operation = self._give("reduce_scatter", _detail(bucket), bucket)
        if scratch is not None:
            scratch.fill_(float("nan"))

        def complete() -> None:
            given = self._take(operation)
            self._untouched(operation, bucket, given[self.rank])
            total = out.float() if add else None
            for source in given:
                part = own_span(source, self.rank, self.size).float() * scale
                total = part if total is None else total + part
            if total is not None:
                bucket.fill_(float("nan"))
                out.copy_(total)
            if squares is not None and out.numel():
                add_up(out, [out], add=False, squares=squares)

        return Handle(complete, lambda: self._all_gave(operation))

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        if shard is not None:
            own_span(full, self.rank, self.size).copy_(shard)
        return self._spread("all_gather", full)

    def _publish(self, full: Tensor) -> Handle:
        return self._spread("publish", full)

    def _all_to_all(self, receives: list[Tensor], sends: list[Tensor]) -> Handle:
        operation = self._give("all_to_all", str(sends[0].dtype), sends)
        for rank in set(range(self.size)) - {self.rank}:
            receives[rank].fill_(float("nan"))

        def complete() -> None:
            given = self._take(operation)
            for mine, before in zip(sends, given[self.rank], strict=True):
                self._untouched(operation, mine, before)
            for rank in set(range(self.size)) - {self.rank}:
                receives[rank].copy_(given[rank][self.rank])

        return Handle(complete, lambda: self._all_gave(operation))

    def _spread(self, kind: str, full: Tensor) -> Handle:
        mine = own_span(full, self.rank, self.size)
        operation = self._give(kind, _detail(full), mine)
        if full.is_floating_point():
            for rank in set(range(self.size)) - {self.rank}:
                own_span(full, rank, self.size).fill_(float("nan"))

        def complete() -> None:
            given = self._take(operation)
            self._untouched(operation, mine, given[self.rank])
            for rank, source in enumerate(given):
                own_span(full, rank, self.size).copy_(source)

        return Handle(complete, lambda: self._all_gave(operation))

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        if scratch is not None and scratch.is_floating_point():
            scratch.fill_(float("nan"))
        operation = self._give("all_reduce", f"{op} of {_detail(tensor)}", tensor)

        def complete() -> None:
            given = self._take(operation)
            self._untouched(operation, tensor, given[self.rank])
            wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            total = given[0].to(wide)
            for source in given[1:]:
                total = total + source.to(wide) if op == "sum" else torch.maximum(total, source.to(wide))
            tensor.copy_(total)

        return Handle(complete, lambda: self._all_gave(operation))

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        operation = self._give("broadcast", f"{_detail(tensor)} from rank {src}", tensor)
        return Handle(lambda: _fill(tensor, self._take(operation)[src]), lambda: self._all_gave(operation))

    def _all_gave(self, operation: Operation) -> bool:
        with self._world.changed:
            given = self._world.given.get((operation.kind, operation.count))  # nothing: everybody has taken it
            return given is None or len(given) == self.size


def _detail(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _fill(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
