"""Whether the ranks of a group have the same, to the bit: by a number that they tell each other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor

from zerokern.comm import Group, Handle
from zerokern.core.errors import StateError
from zerokern.memory import HostTier, Wanted
from zerokern.memory.copies import Copies, Copy

__all__ = ["Compared", "Comparing", "aside", "combined", "fingerprint", "refuse_unlike"]

ROW = 512  # numbers that are added at a time
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
LOW = (1 << 35) - 1
NOBODY = -(1 << 63)
UNLIKE = (
    "inputs of a recomputed function were to be kept in parts by the {size} ranks of a group (replicated=), and are "
    "not the same on all of them: {what}. Allowed: inputs that these ranks have alike, to the bit. What each rank has "
    "of its own, hand over by functools.partial or a closure; where the sequence is divided, inputs are in parts "
    "already: leave replicated= out. Random numbers that differ between the ranks (dropout) make copies differ"
)


class Comparing:
    """Numbers of one group's ranks, compared one after the other; `copies_of`: from a device to host memory.

    >>> group = Group(0, 1, torch.device("cpu"), "alone")
    >>> Comparing(group, lambda tensor: None).begin(torch.tensor(5)).differs()
    False
    """

    def __init__(self, group: Group, copies_of: Callable[[Tensor], Copies | None]) -> None:
        self.group, self.copies_of = group, copies_of
        self._host = HostTier("numbers compared")
        self._rows: list[Tensor] = []
        self._latest: Compared | None = None

    def begin(self, number: Tensor | None) -> Compared:
        """All ranks tell each other their number, if they have any; one such question is open at a time."""
        if self._latest is not None:
            self._latest.settle()
        self._latest = Compared(self, number)
        return self._latest

    def take(self) -> Tensor:
        """Two numbers in host memory that a device reaches."""
        if self._rows:
            return self._rows.pop()
        (row,) = self._host.lay_out([Wanted("numbers compared", torch.Size([2]), torch.int64)])
        return row

    def give(self, row: Tensor) -> None:
        """It is of no more use to whoever took it."""
        self._rows.append(row)


class Compared:
    """A number of each rank, on its way to all of them: whether it is the same everywhere. None: this rank has none."""

    def __init__(self, owner: Comparing, number: Tensor | None) -> None:
        self._owner = owner
        nobody = torch.tensor(NOBODY, device=owner.group.device)
        self._both = torch.stack([nobody, nobody] if number is None else [number, ~number])
        self._copies = owner.copies_of(self._both)
        self._handle: Handle | None = owner.group.all_reduce(self._both, "max")
        self._row: Tensor | None = None
        self._there: Copy | None = None
        self._differs: bool | None = None
        if self._copies is not None:
            self.settle()

    def settle(self) -> None:
        """It has come; on a device nobody waits for that, nor in `differs`, later."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with aside(self._copies):
            handle.wait()
            if self._copies is not None:
                self._row = self._owner.take()
                self._there = self._copies.to_host(self._both, self._row)

    def differs(self) -> bool:
        """Whether any two ranks have different ones."""
        self.settle()
        if self._differs is None:
            if self._there is not None:
                self._there.wait()
            most, least = (self._both if self._row is None else self._row).tolist()
            self._differs = most != NOBODY and most != ~least
            if self._row is not None:
                self._owner.give(self._row)
                self._row = self._there = None
        return self._differs


def aside(copies: Copies | None) -> AbstractContextManager[None]:
    """What is launched within does not come behind what the program launches."""
    return nullcontext() if copies is None else copies.driver.aside()


def fingerprint(span: Tensor) -> Tensor:
    """A number that other bytes, or these in another order, do not have, but by an unlikely chance. Nobody waits.

    >>> x = torch.arange(5000, dtype=torch.uint8)
    >>> one, other = fingerprint(x), fingerprint(x.roll(4096))
    >>> bool(one == fingerprint(x.clone())), bool(one == other)
    (True, False)
    """
    kinds = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # half as wide as the sums, so that no bit is carried out
    itemsize = next(size for size in kinds if span.storage_offset() % size == 0)
    count = span.numel() // (itemsize * ROW) * itemsize * ROW
    rows = span[:count].view(kinds[itemsize]).view(-1, ROW)
    columns, sums = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
    return _mixed(_mixed(_mixed(_weighted(columns)) + _weighted(sums)) + _weighted(span[count:].to(torch.int64)))


def _weighted(numbers: Tensor) -> Tensor:
    """A sum to which each adds by its place."""
    weights = torch.arange(1, numbers.numel() + 1, dtype=torch.int64, device=numbers.device)
    return (numbers * (_mixed(weights) | 1)).sum()


def _mixed(number: Tensor) -> Tensor:
    """Another for each, with every bit in many."""
    once = number * ODD
    return (once ^ ((once >> 29) & LOW)) * ODD


def combined(prints: Sequence[Tensor], shapes: Sequence[str], device: torch.device) -> Tensor:
    known = torch.tensor(zlib.crc32(repr(shapes).encode()), device=device)
    return _mixed(_weighted(torch.stack([known, *prints]))) >> 1  # so that it is not NOBODY


def refuse_unlike(said: list[tuple[list[str], list[int] | None]]) -> NoReturn:
    """`said`: of each rank, what it kept, and the numbers of that; None: it has these no more."""
    there = {rank: list(zip(shapes, prints, strict=True)) for rank, (shapes, prints) in enumerate(said) if prints}
    there.update({rank: [] for rank, (_, prints) in enumerate(said) if prints == []})
    what = "what they kept"
    for number in range(max(map(len, there.values()), default=0)):
        found = {rank: kept[number] if number < len(kept) else ("nothing of 1 MiB", 0) for rank, kept in there.items()}
        if len(set(found.values())) > 1:
            words = [f"rank {rank} has {shape} ({value & 0xFFFF:04x})" for rank, (shape, value) in found.items()]
            what = f"of input {number}, " + "; ".join(words)
            break
    raise StateError(UNLIKE.format(size=len(said), what=what))
