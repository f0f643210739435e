"""A pool of reusable host memory blocks, and the tier that stores a device's tensors in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerokern.memory.copies import Copies, Copy
from zerokern.memory.staging import Ticket
from zerokern.memory.tier import HostTier, Tier, Wanted

__all__ = ["BlockPool", "BlockTier", "HostBlock"]

SLACK = 2  # a block serves what is smaller, down to this part of it


class HostBlock:
    """A block of host memory, and the last copy to or from it."""

    __slots__ = ("last", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Copy | None = None


class BlockPool:
    """A pool of pinned memory blocks. Pinning costs a system call for each page, so blocks are kept for reuse.

    The pool never holds more bytes than were in use at once: if sizes change, the smallest free blocks make way for a
    larger one.

    >>> blocks = BlockPool("example")
    >>> one = blocks.take(8192); blocks.give(one)
    >>> blocks.take(5000) is one, blocks.nbytes
    (True, 8192)
    """

    def __init__(self, owner: str) -> None:
        self._host = HostTier(owner)
        self._owner = owner
        self._free: list[HostBlock] = []
        self.nbytes = 0  # of all blocks
        self._most_nbytes = 0  # that were in use at once

    def take(self, nbytes: int) -> HostBlock:
        """Returns the smallest free block of at least nbytes."""
        fitting = [block for block in self._free if block.memory.numel() >= nbytes]
        best = min(fitting, key=lambda block: block.memory.numel(), default=None)
        # a far too large block is used only if no more memory may be allocated
        if best is None or (best.memory.numel() > SLACK * nbytes and self.nbytes + nbytes <= self._most_nbytes):
            return self._new(nbytes)
        self._free.remove(best)
        self._count()
        return best

    def _new(self, nbytes: int) -> HostBlock:
        most = max(self._most_nbytes, self._in_use + nbytes)
        self._free.sort(key=lambda block: block.memory.numel(), reverse=True)
        while self._free and self.nbytes + nbytes > most:
            self.nbytes -= self._free.pop().memory.numel()
        (memory,) = self._host.lay_out([Wanted(self._owner, torch.Size([nbytes]), torch.uint8)])
        self.nbytes += nbytes
        self._count()
        return HostBlock(memory)

    def give(self, block: HostBlock) -> None:
        """Gives a block back to the pool."""
        self._free.append(block)

    @property
    def _in_use(self) -> int:
        return self.nbytes - sum(block.memory.numel() for block in self._free)

    def _count(self) -> None:
        self._most_nbytes = max(self._most_nbytes, self._in_use)


class BlockPart:
    """A part of a `BlockTier`: in a block, or on its way through one to the tier behind, of which it is the ticket."""

    __slots__ = ("block", "going", "part", "storing", "tier", "wanted")

    def __init__(self, tier: BlockTier, wanted: Wanted) -> None:
        self.tier, self.wanted = tier, wanted
        self.block: HostBlock | None = None
        self.part: Any = None  # in the tier behind
        self.going: Ticket | None = None
        self.storing: Ticket | None = None  # in the tier behind

    def begin(self) -> None:
        """Starts to store the block, once it has arrived, in the tier behind."""
        block, going, behind = self.block, self.going, self.tier.behind
        if block is None or going is None or behind is None or self.storing is not None:
            return
        going.wait()
        if self.part is None:
            (self.part,) = behind.lay_out([self.wanted])
        self.storing = behind.store(self.part, block.memory[: self.wanted.nbytes])

    def wait(self) -> None:
        """Stores the block in the tier behind, then returns it to the pool."""
        self.begin()
        storing, self.storing = self.storing, None
        if storing is not None:
            storing.wait()  # if it raises, the block still has what there is
            self.release()

    def done(self) -> bool:
        """Returns whether the block has been returned."""
        return self.block is None

    def release(self) -> None:
        """Returns the block to the pool, whether it was stored or not."""
        block, self.block, self.going, self.storing = self.block, None, None, None
        if block is not None:
            self.tier.give(self.wanted, block)


class BlockTier:
    """A tier for a device's tensors: blocks of host memory, or a tier `behind` these.

    Copies of a device are ordered by its streams, so the host does not wait. A tier behind receives a block's content
    when the ticket of the store is waited for, or from its `begin` on; until then the part is fetched from its block.
    """

    def __init__(self, blocks: BlockPool, copies: Copies, behind: Tier[Any] | None = None) -> None:
        self.blocks, self.copies, self.behind = blocks, copies, behind
        self._held: Counter[str] = Counter()

    def lay_out(self, wanted: Sequence[Wanted]) -> list[BlockPart]:
        """Returns parts that take memory when they are stored."""
        return [BlockPart(self, spec) for spec in wanted]

    def store(self, part: BlockPart, value: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to copy a device tensor into a block, after the last copy of that block."""
        if after is not None:
            after.wait()
        if part.block is None:
            part.block = self.blocks.take(value.numel())
            self._held[part.wanted.role] += value.numel()
        block = part.block
        block.last = self.copies.to_host(value, block.memory[: value.numel()], after=block.last)
        part.going = block.last
        return block.last if self.behind is None else part

    def fetch(self, part: BlockPart, out: Tensor, after: Ticket | None = None) -> Ticket:
        """Starts to copy a part to the device; from a tier behind through a block, which the ticket's `gate` waits
        for."""
        if after is not None:
            after.wait()
        if part.block is not None:
            part.block.last = self.copies.to_device(part.block.memory[: out.numel()], out, after=part.block.last)
            return part.block.last
        assert self.behind is not None
        block = self.blocks.take(out.numel())
        if block.last is not None:
            block.last.wait()  # its last copy: the tier behind knows nothing of the device's streams
        memory = block.memory[: out.numel()]
        return _FetchBehind(self, block, self.behind.fetch(part.part, memory), memory, out)

    def evict(self, parts: Iterable[BlockPart]) -> None:
        """Frees the parts' blocks and their room in the tier behind."""
        for part in parts:
            part.release()
            if part.part is not None and self.behind is not None:
                self.behind.evict([part.part])
                part.part = None

    def held(self) -> dict[str, int]:
        """Returns the bytes in blocks and in the tier behind, by role."""
        return dict(Counter({} if self.behind is None else self.behind.held()) + self.held_in_blocks())

    def held_in_blocks(self) -> Counter[str]:
        """Returns the bytes in blocks, by role."""
        return +self._held

    def give(self, wanted: Wanted, block: HostBlock) -> None:
        """Returns the block of such a part to the pool."""
        self._held[wanted.role] -= wanted.nbytes
        self.blocks.give(block)


class _FetchBehind:
    """The ticket of a fetch from the tier behind: first into a block, then to the device."""

    def __init__(self, tier: BlockTier, block: HostBlock, coming: Ticket, memory: Tensor, out: Tensor) -> None:
        self._tier, self._coming, self._memory, self._out = tier, coming, memory, out
        self._block: HostBlock | None = block
        self._copy: Copy | None = None

    def gate(self) -> None:
        """Waits on the host for the tier behind; later work of the current stream waits for the copy to the device."""
        block = self._block
        if block is not None:
            self._coming.wait()
            self._copy = block.last = self._tier.copies.to_device(self._memory, self._out)
            self._block = None
            self._tier.blocks.give(block)
        assert self._copy is not None
        self._copy.gate()

    def wait(self) -> None:
        self.gate()
        assert self._copy is not None
        self._copy.wait()

    def done(self) -> bool:
        return self._copy is not None and self._copy.done()
