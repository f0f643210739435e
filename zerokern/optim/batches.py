"""Cuts rows into batches that move together: those of a record, and state that passes through slots on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerokern.core.units import Piece
from zerokern.io.pieces import Content, Width, plan
from zerokern.io.pieces import columns as columns_of
from zerokern.memory import Rest
from zerokern.optim.matrices import Matrix, is_cut
from zerokern.optim.rounds import rounds_of
from zerokern.optim.transit import SLOTS

__all__ = ["RowBatch", "pieces_of", "whole_pieces"]

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
