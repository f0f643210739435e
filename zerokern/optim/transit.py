"""Cuts rows into batches that move together, and moves those from host memory through slots on a device, where they are
updated, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerokern.core.units import Piece
from zerokern.io.pieces import Content, Width, plan
from zerokern.io.pieces import columns as columns_of
from zerokern.memory import DevicePool, Rest, Wanted
from zerokern.memory.copies import Copies, Copy
from zerokern.optim.formats import TAKES_LESS
from zerokern.optim.matrices import Matrix, is_cut
from zerokern.optim.rounds import rounds_of

__all__ = ["SLOTS", "Passage", "RowBatch", "Transit", "pieces_of", "whole_pieces"]

SLOTS = 4  # one is filled, one updated, one emptied; one more, so that none of them waits for another
_AHEAD = 4 * SLOTS  # batches that the host has launched and that have not ended
_PARTS = 64  # of all state, of which one is in a slot: what comes before the first update and after the last is short
_LEAST, _MOST = 256 << 10, 64 << 20  # bytes of a slot
_LEAST_OF_MATRICES = 32 << 20  # their calls take longer than copies of as many bytes


def pieces_of(numels: Sequence[int], widths: Sequence[tuple[Width, ...]]) -> tuple[list[Content], int, int]:
    """Returns the pieces that state of these elements is moved in, how many slots there are, and the bytes of each.

    >>> pieces, slots, nbytes = pieces_of([1 << 20], [(Width(4, 1), Width(4, 1))])
    >>> len(pieces), slots, nbytes
    (32, 4, 262144)
    """
    total = sum(columns_of(mine, numel)[1] for numel, mine in zip(numels, widths, strict=True))
    return _in_slots(plan(numels, widths, _bound(total, _LEAST)))


def whole_pieces(
    matrices: Sequence[Matrix], widths: Sequence[tuple[Width, ...]], turns: Sequence[int] = ()
) -> tuple[list[Content], int, int]:
    """Returns what `pieces_of` does, where the state of a matrix is moved at once: small ones share pieces, cut ones
    have that of a round. A round is of one turn (`turns`: those of the matrices), and the same on all ranks.

    >>> two, matrices = Width(2, 1), [Matrix(0, 32, 8, 4), Matrix(0, 4096 * 2048, 4096, 2048), Matrix(32, 64, 16, 4)]
    >>> [nbytes for _, nbytes in whole_pieces(matrices, [(two, Width(4, 1))] * 3)[0]]
    [576, 50331648]
    """
    turns = turns or [0] * len(matrices)
    sizes = [columns_of(mine, one.numel)[1] for one, mine in zip(matrices, widths, strict=True)]
    cut = [(row, one) for row, one in enumerate(matrices) if is_cut(one)]
    uncut = [row for row, one in enumerate(matrices) if not is_cut(one)]
    most = _bound(sum(sizes[row] for row in uncut), _LEAST_OF_MATRICES)
    found: list[list[int]] = []
    room = -1  # in the last piece of small ones, which others go on filling behind a large one
    for row in sorted(uncut, key=turns.__getitem__):
        if sizes[row] > most:
            found.append([row])
            continue
        if sizes[row] > room:
            found.append(small := [])
            room = most
        small.append(row)
        room -= sizes[row]
    for turn in sorted({turns[row] for row, _ in cut}):
        mine = [(row, one, torch.float32) for row, one in cut if turns[row] == turn]
        found += [list(one.rows) for one in rounds_of(mine)]
    pieces = []
    for some in sorted(found, key=lambda some: turns[some[0]]):
        segments, end = [], 0
        for row in some:
            segments.append(Piece(row, matrices[row].start, matrices[row].numel, end))
            end += sizes[row]
        pieces.append((tuple(segments), end))
    return _in_slots(pieces)


def _bound(total: int, least: int) -> int:
    """Returns how many bytes of state a slot is to have at most, of so many in all."""
    return min(max(-(-total // _PARTS), least), _MOST)


def _in_slots(pieces: list[Content]) -> tuple[list[Content], int, int]:
    return pieces, min(SLOTS, len(pieces)), max((nbytes for _, nbytes in pieces), default=0)


@dataclass
class RowBatch:
    """Rows [begin, end) of a table, which are updated together: those of one record, or of parameters that rest in
    one place. `members`: for each of them."""

    record: Any
    turns: list[int] = field(default_factory=list)
    members: list[tuple[int, Any]] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    params: list[Rest] = field(default_factory=list)
    """where the parameters rest that are fetched for it"""
    gradients: list[Rest] = field(default_factory=list)
    """where their gradients do, in the step at hand"""

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts what several turns share to the first of them, and last there, next to the batches of the second."""
        return min(self.turns), self.record is None, max(self.turns)


class Passage:
    """The ticket of copies and launches that come one after the other: it ends with the last of them.

    >>> class Ended:
    ...     def __init__(self, begin, end): self._times = begin, end
    ...     def times(self): return self._times
    >>> Passage(Ended(1, 2), Ended(5, 7)).times()
    (1, 7)
    """

    def __init__(self, first: Copy, last: Copy) -> None:
        self.first, self.last = first, last

    def wait(self) -> None:
        """Waits on the host."""
        self.last.wait()

    def done(self) -> bool:
        """Whether all of it has ended."""
        return self.last.done()

    def gate(self) -> None:
        """Makes the current stream wait."""
        self.last.gate()

    def times(self) -> tuple[int, int] | None:
        """Returns when the first began and the last ended, where the device's marks know that."""
        first, last = self.first.times(), self.last.times()
        return None if first is None or last is None else (first[0], last[1])


class Transit:
    """Passes numbered batches through `SLOTS` slots on a device; each is copied there, updated, and copied back.

    A batch passes beside those before and behind it. It enters a slot when the one that had it is back, which the
    device's streams see to: the host waits for no batch but one that was launched long before. `beside`: updates run on
    a stream of their own, which does not wait for what the program launches after `begin`; else on the current one.
    """

    def __init__(self, link: Copies, place: torch.device, name: str, *, beside: bool) -> None:
        self._link, self._name, self._beside = link, name, beside
        self._pool = DevicePool(place)
        self.slots: list[Tensor] = []
        self._moved: list[tuple[list[Tensor], list[Tensor]]] = []  # of each batch: tensors in host memory, and there
        self._checked: set[int] = set()  # batches whose copies have been
        self._under_way: dict[int, Copy] = {}  # ways back, by batch
        self._start: Copy | None = None  # what the update at hand comes after
        self._last: Copy | None = None  # the end of the last batch that was launched
        self._ready: Copy | None = None
        self._gated = False

    def lay_out(self, sizes: Sequence[int]) -> None:
        """Makes slots for batches of so many bytes, which hold nothing yet."""
        self.end()
        count, nbytes = min(SLOTS, len(sizes)), max(sizes, default=0)
        if len(self.slots) != count or (self.slots and self.slots[0].nbytes != nbytes):
            self.slots = []  # before others are made, which the device clears first
            self._last = None
            self.slots = self._pool.lay_out(
                [Wanted("ring", torch.Size([nbytes]), torch.uint8)] * count, self._name, TAKES_LESS
            )
        self._moved, self._checked = [([], []) for _ in sizes], set()

    def slot(self, number: int) -> Tensor:
        """Returns the slot that a batch passes through."""
        return self.slots[number % len(self.slots)]

    def add(self, number: int, resting: Tensor, there: Tensor) -> None:
        """Adds a tensor to a batch. `there`: where it lies in the slot."""
        for tensors, one in zip(self._moved[number], (resting, there), strict=True):
            tensors.append(one)

    def begin(self) -> None:
        """Begins an update: it comes after what the current stream has been given."""
        self._under_way.clear()
        self._start = self._link.here()
        self._ready = self._start if self._last is None else self._last  # slots and state are as the last one left them
        self._gated = False

    def stream(self) -> AbstractContextManager[Any]:
        """The context of launches: the stream that updates run on."""
        return self._link.driver.aside("update") if self._beside else contextlib.nullcontext()

    def launch(self, number: int, run: Callable[[], object]) -> tuple[Passage, Copy]:
        """Launches a batch's way there, what `run` launches on the current stream, and the way back.

        Returns tickets of what ends with the update, and of the way back. Where it fails, nothing of it is under way.
        """
        if self._beside and not self._gated:
            self.started.gate()
            self._gated = True
        (resting, there), checked = self._moved[number], number in self._checked
        free, long_before = self._under_way.get(number - len(self.slots)), self._under_way.get(number - _AHEAD)
        filled = self._link.to_device(resting, there, ready=self._ready, after=free, checked=checked)
        try:
            filled.gate()
            run()
            updated = self._link.here()
            emptied = self._link.to_host(there, resting, ready=updated, checked=checked)
        except BaseException:
            with contextlib.suppress(Exception):
                filled.wait()
            raise
        self._under_way[number] = emptied
        self._checked.add(number)
        self._last = emptied
        if long_before is not None and not self._beside:
            long_before.wait()
        return Passage(filled, updated), emptied

    @property
    def started(self) -> Copy:
        """The ticket of what the update at hand comes after."""
        assert self._start is not None
        return self._start

    def wait_for(self, number: int) -> None:
        """Returns once a batch is in host memory again; raises what failed."""
        emptied = self._under_way.pop(number, None)
        if emptied is not None:
            emptied.wait()

    def wait(self) -> None:
        """Returns once all state is in host memory again; raises what failed."""
        if self._last is not None:
            self._last.wait()

    def end(self) -> None:
        """Returns once nothing is under way, whatever became of it. The next update comes after all of it."""
        self._last = None
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way.popitem()[1].wait()

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return sum(slot.nbytes for slot in self.slots)
