"""Collectives that are wrong in ways that a bug would make them, put in place of the right ones for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from worlds import World

from zerokern.comm.group import Group

__all__ = ["first_bucket_twice", "nothing", "one_rank_forgotten", "stale_gather", "tail_dropped"]


class Later:
    """A handle that spoils the result once it is there."""

    def __init__(self, handle: object, spoil: Callable[[], object] | None) -> None:
        self.handle, self.spoil = handle, spoil

    def wait(self) -> None:
        self.handle.wait()
        spoil, self.spoil = self.spoil, None
        if spoil:
            spoil()

    def advance(self) -> bool:
        self.wait()
        return False

    def done(self) -> bool:
        return self.handle.done()


@contextmanager
def instead(name: str, wrong: Callable) -> Iterator[None]:
    right = getattr(Group, name)
    setattr(Group, name, functools.partialmethod(wrong, right))
    try:
        yield
    finally:
        setattr(Group, name, right)


def first_bucket_twice(world: World) -> object:
    """Of each step one bucket is summed twice; but for the clip factor Adam would hardly notice."""
    chosen: list[int] = []

    def wrong(self: Group, right: Callable, bucket: Tensor, out: Tensor, **settings: object) -> object:
        chosen.append(out.data_ptr())
        spoil = functools.partial(out.mul_, 2.0) if out.data_ptr() == chosen[0] else None
        return Later(right(self, bucket, out, **settings), spoil)

    return instead("reduce_scatter", wrong)


def tail_dropped(world: World) -> object:
    """The last sixteenth of what rank 1 contributes to each bucket is lost."""

    def wrong(self: Group, right: Callable, bucket: Tensor, out: Tensor, **settings: object) -> object:
        if world.rank == 1:
            with torch.no_grad():
                bucket[-(bucket.numel() // 16) :] = 0
        return right(self, bucket, out, **settings)

    return instead("reduce_scatter", wrong)


def one_rank_forgotten(world: World) -> object:
    """What rank 1 contributes is not there, and the sum is divided by one rank less: a plausible mean."""

    def wrong(self: Group, right: Callable, bucket: Tensor, out: Tensor, **settings: object) -> object:
        if world.rank == 1:
            with torch.no_grad():
                bucket.zero_()
        return right(self, bucket, out, **{**settings, "scale": 2.0 * settings.get("scale", 1.0)})

    return instead("reduce_scatter", wrong)


def stale_gather(world: World) -> object:
    """One exchange of parameters in ten brings nothing of the other ranks: seldom, as a race would."""
    calls: list[int] = []

    def wrong(self: Group, right: Callable, whole: Tensor, shard: Tensor | None = None) -> object:
        calls.append(1)
        if len(calls) % 10 != 5:
            return right(self, whole, shard)
        kept = whole.clone() if shard is None else torch.zeros_like(whole)
        numel = whole.numel() // self.size

        def spoil() -> None:
            own = whole[self.rank * numel : (self.rank + 1) * numel].clone()
            whole.copy_(kept)
            whole[self.rank * numel : (self.rank + 1) * numel] = own

        return Later(right(self, whole, shard), spoil)

    return instead("all_gather", wrong)


@contextmanager
def nothing(world: World) -> Iterator[None]:
    """What wraps the sabotage, without it."""

    def same(self: Group, right: Callable, *arguments: object, **settings: object) -> object:
        return Later(right(self, *arguments, **settings), None)

    with instead("reduce_scatter", same), instead("all_gather", same):
        yield
