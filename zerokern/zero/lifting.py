"""The way of what rests on a disk to the device that computes: through a ring of pinned memory, on a thread of its own.

The disk fills the memory of a `Rest`; a span of it after the other goes through a slot of the ring, so that the memory
that is pinned is the ring alone, whatever the size of a unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from zerokern.memory import Copies, HostTier, Rest, Wanted
from zerokern.memory.arena import PAGE
from zerokern.memory.copies import Copy

__all__ = ["Lift", "Lifting"]

LARGEST = 16 << 20


class Lifting:
    """The ticket of one shard: nobody touches where it goes before `gate` or `wait`, which raise what went wrong."""

    def __init__(self, future: Future[Copy | None]) -> None:
        self._future = future

    def gate(self) -> None:
        """What the current stream is given from now on begins when it is there; the host waits for the disk alone."""
        last = self._future.result()
        if last is not None:
            last.gate()

    def wait(self) -> None:
        """Returns once it is there."""
        last = self._future.result()
        if last is not None:
            last.wait()

    def done(self) -> bool:
        """Whether it is there, or never will be."""
        if not self._future.done():
            return False
        failed = self._future.exception() is not None
        last = None if failed else self._future.result()
        return last is None or last.done()


class Lift:
    """What takes shards up, one after the other. `host`: memory that its copies reach."""

    def __init__(self, driver: Any, ring_nbytes: int, owner: str) -> None:
        self.copies = Copies(driver)
        self.host = HostTier(owner, copies=self.copies)
        self._slot_nbytes = min(LARGEST, max(PAGE, ring_nbytes // 2 // PAGE * PAGE))
        slot = Wanted("ring", torch.Size([self._slot_nbytes]), torch.uint8)
        self._slots = self.host.lay_out([slot] * max(2, ring_nbytes // self._slot_nbytes))
        self._drained: list[Any] = [None] * len(self._slots)
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "zerokern lift")
        weakref.finalize(self, self._thread.shutdown, wait=False).atexit = False

    def parts(self, span: Tensor) -> list[Tensor]:
        """A span of the device's memory as it is filled: one slot after the other."""
        return list(span.view(torch.uint8).split(self._slot_nbytes))

    def start(self, rest: Rest, parts: Sequence[Tensor]) -> Lifting:
        """What rests, and has been fetched by the caller, is on its way into memory that the current stream has left.

        The caller lets go of it once the ticket has been waited for.
        """
        return Lifting(self._thread.submit(self._carry, rest, parts, self.copies.here()))

    def _carry(self, rest: Rest, parts: Sequence[Tensor], ready: Copy) -> Copy | None:
        last: Copy | None = None
        try:
            rest.wait()
            source = rest.memory.view(torch.uint8)
            for part, span in zip(parts, source.split(self._slot_nbytes), strict=True):
                number, self._next = self._next % len(self._slots), self._next + 1
                if self._drained[number] is not None:
                    self._drained[number].wait()
                slot = self._slots[number][: span.numel()]
                if self.copies.driver.pinned(slot):
                    slot.copy_(span)
                    last = self.copies.to_device(slot, part, ready=ready)
                else:  # the system has refused that, and was named
                    ready.wait()
                    part.copy_(span)
                    last = self.copies.here()
                self._drained[number] = last
        except BaseException:
            if last is not None:
                last.wait()  # nothing moves into memory that nobody waits for
            raise
        return last
