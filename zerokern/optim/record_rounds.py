"""Says in which order an update passes records that hold state of matrices which ranks have cut (`cut_matrices`).

All ranks make the same rounds in the same order; which records a rank has, and how many, is its own affair. So rounds
hang on records: each comes as soon as all averages that this rank has of it have moved, and records of masters and
remainders as soon as all of their matrices have come back. A rank that has nothing of a round makes it all the same.
So that all ranks have one order of collectives, rounds come one by one here, each in a batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any

import torch

from zerokern.optim.cut_matrices import CutMatrix, Round, rounds_of
from zerokern.optim.matrices import MatrixPart, part_of

__all__ = ["in_rounds"]


def in_rounds(batches: Sequence[Any], matrices: Sequence[Any], dtypes: Sequence[torch.dtype]) -> list[Any]:
    """Returns the batches (`RowBatch`) of an update in the order in which it passes them.

    Batches without a record have a row for each cut matrix: these go to the batches after whose other rows their rounds
    are made. `matrices`, `dtypes`: of each parameter, and what these are orthogonalized in.
    """
    made: list[Any] = []
    for _, some in groupby(batches, key=lambda batch: min(batch.turns)):
        turn = list(some)
        cut = [member for batch in turn for member in batch.members if isinstance(member[1], CutMatrix)]
        made += _turn_in_rounds(turn, cut, matrices, dtypes) if cut else turn
    return made


def _turn_in_rounds(
    turn: Sequence[Any], cut: Sequence[Any], matrices: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> list[Any]:
    """Does so for one turn of the update, whose cut matrices are these members. They are in one bucket, alone."""
    loose = next(batch for batch in turn if batch.record is None)
    loose.params = list({id(rest): rest for batch in turn for rest in batch.params}.values())
    records = [batch for batch in turn if batch.record is not None]
    passes = [_passes_of(batch, matrices) for batch in records]
    rounds = rounds_of([(at, part, dtypes[i]) for at, (i, part) in enumerate(cut) if part.height * part.width])
    made: list[Any] = []
    for number, some in _walk(passes, rounds):
        batch = replace(loose, members=[]) if number is None else records[number]
        batches = [batch, *(replace(loose, members=[]) for _ in some[1:])]
        for one, of in zip_longest(some, batches):
            of.members = [*of.members, *(cut[row] for row in (() if one is None else one.rows))]
            of.turns = [loose.turns[0]] * len(of.members)
        made += batches
    return made


def _passes_of(batch: Any, matrices: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Returns of which matrices, by id, a record has averages, and of which all else."""
    parts = [part for i, place in batch.members if isinstance(part := part_of(matrices[i], place), MatrixPart)]
    averages = {id(part.matrix) for part in parts if part.averages}
    return averages, {id(part.matrix) for part in parts if part.applies}


def _walk(
    records: Sequence[tuple[set[int], set[int]]], rounds: Sequence[Round]
) -> Iterator[tuple[int | None, list[Round]]]:
    """Yields numbers of records, each with the rounds that come after it; None: before any record."""
    order: list[tuple[int | None, list[Round]]] = []
    waiting, back = list(range(len(records))), set()
    for one in rounds:
        mine = set(map(id, one.parts))
        order += [(number, []) for number in waiting if records[number][0] & mine]
        if not order:
            order.append((None, []))
        order[-1][1].append(one)
        back |= mine
        passed = {number for number, _ in order}
        waiting = [number for number in waiting if number not in passed]
        order += [(number, []) for number in waiting if records[number][1] and records[number][1] <= back]
        waiting = [number for number in waiting if number not in {number for number, _ in order}]
    assert not waiting
    return iter(order)
