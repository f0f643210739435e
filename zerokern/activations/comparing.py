"""Checks that the ranks of a group kept the same inputs, to the bit, by comparing fingerprints of them."""

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
NO_NUMBER = -(1 << 63)
UNLIKE = (
    "inputs of a recomputed function were to be kept in parts by the {size} ranks of a group (replicated=), and are "
    "not the same on all of them: {what}. Allowed: inputs that these ranks have alike, to the bit. What each rank has "
    "of its own, hand over by functools.partial or a closure; where the sequence is divided, inputs are in parts "
    "already: leave replicated= out. Random numbers that differ between the ranks (dropout) make copies differ"
)


class Comparing:
    """Compares numbers of a group's ranks, one comparison at a time.

    `copies_of` returns what copies a device's tensor to host memory, or None if it lies there.

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
        """Starts to compare this rank's number, or None, with those of the others; ends the comparison before."""
        if self._latest is not None:
            self._latest.receive()
        self._latest = Compared(self, number)
        return self._latest

    def take_row(self) -> Tensor:
        """Returns pinned host memory for two numbers."""
        if self._rows:
            return self._rows.pop()
        (row,) = self._host.lay_out([Wanted("numbers compared", torch.Size([2]), torch.int64)])
        return row

    def return_row(self, row: Tensor) -> None:
        """Takes the memory back."""
        self._rows.append(row)


class Compared:
    """One comparison: an all-reduce of each rank's number and its complement, whose maxima fit if all are the same."""

    def __init__(self, owner: Comparing, number: Tensor | None) -> None:
        self._owner = owner
        none = torch.tensor(NO_NUMBER, device=owner.group.device)
        self._both = torch.stack([none, none] if number is None else [number, ~number])
        self._copies = owner.copies_of(self._both)
        self._handle: Handle | None = owner.group.all_reduce(self._both, "max")
        self._row: Tensor | None = None
        self._copy: Copy | None = None
        self._differs: bool | None = None
        if self._copies is not None:
            self.receive()

    def receive(self) -> None:
        """Waits for the all-reduce; a device's result is copied to host memory, without a wait of the host."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with aside(self._copies, "reduce"):
            handle.wait()
            if self._copies is not None:
                self._row = self._owner.take_row()
                self._copy = self._copies.to_host(self._both, self._row)

    def differs(self) -> bool:
        """Returns whether two ranks have different numbers; waits for the result."""
        self.receive()
        if self._differs is None:
            if self._copy is not None:
                self._copy.wait()
            most, least = (self._both if self._row is None else self._row).tolist()
            self._differs = most != NO_NUMBER and most != ~least
            if self._row is not None:
                self._owner.return_row(self._row)
                self._row = self._copy = None
        return self._differs


def aside(copies: Copies | None, name: str) -> AbstractContextManager[None]:
    """Context manager whose launches go to a stream beside the program's, so that they do not queue behind it."""
    return nullcontext() if copies is None else copies.driver.aside(name)


def fingerprint(span: Tensor) -> Tensor:
    """Returns a 64-bit number of these bytes and their order, as a tensor on their device; the host does not wait.

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
    """Returns a sum that depends on the order of the numbers."""
    weights = torch.arange(1, numbers.numel() + 1, dtype=torch.int64, device=numbers.device)
    return (numbers * (_mixed(weights) | 1)).sum()


def _mixed(number: Tensor) -> Tensor:
    """Returns a number each bit of which depends on many bits of the argument, and no two arguments have the same."""
    once = number * ODD
    return (once ^ ((once >> 29) & LOW)) * ODD


def combined(prints: Sequence[Tensor], shapes: Sequence[str], device: torch.device) -> Tensor:
    """Returns one fingerprint of several, and of what they are of."""
    known = torch.tensor(zlib.crc32(repr(shapes).encode()), device=device)
    return _mixed(_weighted(torch.stack([known, *prints]))) >> 1  # so that it is not NO_NUMBER


def refuse_unlike(said: list[tuple[list[str], list[int] | None]]) -> NoReturn:
    """Raises, and names the first input that differs. `said` has for each rank the shapes of its inputs and their
    fingerprints; None if its graph is gone."""
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
