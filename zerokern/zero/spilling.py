"""Gradients that wait on a disk: where they do not fit into memory beside what else a step needs there.

A bucket's are there while a backward pass fills and reduces it, and while somebody uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import Group, during
from zerokern.core.errors import say_once
from zerokern.memory.interrupts import whole
from zerokern.memory.rest import Rest, Rests
from zerokern.memory.room import amount, exceeds_half_of_memory
from zerokern.zero.gradients import LAUNCHED, GradientBucket

__all__ = ["SpilledBucket", "kind_of_bucket"]


def kind_of_bucket(rests: Rests | None, group: Group, nbytes: int) -> Callable[..., GradientBucket]:
    """What gradients of so many bytes are kept in, on this rank and on all others alike."""
    if rests is None or not nbytes or group.device.type != "cpu":
        return GradientBucket
    word = torch.tensor([float(exceeds_half_of_memory(nbytes))])
    if not group.everyone.alone:
        with during("zk.shard", of="where gradients wait"):
            group.all_reduce(word, "max").wait()
    if not word.item():
        return GradientBucket
    say_once(
        "zerokern",
        f"gradients of {amount(nbytes)} take more than half of the memory that is left (on one rank at least), "
        f"and wait in {rests.tier!r} between backward and step(): a step writes them once more, and reads them",
    )
    return partial(SpilledBucket, rests=rests)


class SpilledBucket(GradientBucket):
    """As `GradientBucket`; what is reduced, and what no_sync leaves unreduced, rests on a disk between passes."""

    leaves_memory = True

    def __init__(self, *of: Any, rests: Rests) -> None:
        """`of`: as a `GradientBucket`'s."""
        super().__init__(*of)
        self._rests = rests
        self._unreduced: Rest | None = None  # on several ranks, what passes under no_sync have left
        self._pass: ExitStack | None = None  # while one writes here
        self._allocate()

    def _allocate(self) -> None:
        """Memory of its own, and all that always refers to it."""
        rest = self.shown.rest = self._rests.make("gradients", self.memory.bucket.shard_numel, self.dtype)
        if self.group.alone:
            self._lay(rest.memory)
        self.shown.make(rest.memory)
        rest.is_viewed()

    @property
    def _rest(self) -> Rest:
        assert self.shown.rest is not None
        return self.shown.rest

    def whole_buffer(self) -> Tensor:
        """On one rank it is what is reduced; else what passes under no_sync add to."""
        if self.buffer is None:
            self._unreduced = self._rests.make("unreduced gradients", self.memory.bucket.padded_numel, self.dtype)
            self._lay(self._unreduced.memory)
            self._unreduced.is_viewed()
        assert self.buffer is not None
        return self.buffer

    def spare_kept_gradients(self) -> None:
        super().spare_kept_gradients()
        if self._rest.is_lent:  # parts of gradients: where all are live, whoever has these follows what is added
            live = set(self.inbox.kept())
            if len(live) < len(self.entries):
                with whole("gradients that the program has kept"):
                    self._move(live)

    def _move(self, live: set[int], *, out: bool = False) -> None:
        before = self._rest
        before.fetch()  # for good: who has kept gradients drops them one by one, and nobody can count who is left
        before.wait()
        self._allocate()
        if live:
            with self._rest.used(changed=True):
                self._rest.memory.copy_(before.memory)
        self.give(live)

    @property
    def _parts(self) -> list[Rest]:
        return list(filter(None, (self._rest, self._unreduced)))

    def _present(self, *, written: bool) -> ExitStack:
        """Fetches them; they are here until the result is closed, whether a pass uses them or not."""
        with ExitStack() as stack:
            for rest in self._parts:
                stack.enter_context(rest.used(changed=written))
            return stack.pop_all()

    def open(self, buffer: Tensor) -> None:
        if self._pass is None:
            if not self.inbox.kept():  # what nobody shows any more is not read
                for rest in self._parts:
                    rest.forget()
            try:
                self._pass = self._present(written=True)
            except Exception as error:
                error.args = (f"{self.called} cannot be fetched: {error}",)
                self.group.fail(str(error))
                raise
        super().open(buffer)

    def _let_rest(self) -> None:
        used, self._pass = self._pass, None
        if used is not None:
            used.close()

    def close(self, *, reduces: bool) -> None:
        super().close(reduces=reduces)
        if not reduces:
            self._let_rest()

    def tell(self) -> None:
        super().tell()
        if self._unreduced is not None:
            self._unreduced.forget()
        self._let_rest()

    def _take_after_launch(self, place: int, grad: Tensor) -> None:
        with self._present(written=self.phase < LAUNCHED):
            super()._take_after_launch(place, grad)

    def reduce_after_launch(self, scratch: Tensor | None) -> None:
        with self._present(written=True):
            super().reduce_after_launch(scratch)

    def scale(self, factor: float | Tensor) -> None:
        if self.shown.held:
            with self._present(written=True):
                super().scale(factor)

    def call_hooks(self, places: Iterable[int]) -> None:
        places = list(places)
        if any(self.shards[place].has_hooks for place in places):
            with self._present(written=False):  # fetched once for all of them
                super().call_hooks(places)

    def reset(self) -> None:
        self._let_rest()
        super().reset()
        if self.buffer is None:
            self._unreduced = None
