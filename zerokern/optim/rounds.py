"""Matrices of which ranks have parts (stage 3): each comes together on one rank, which orthogonalizes it.

It goes round by round, with a matrix for each rank. A rank moves the averages of its own parts, and sends what results
to the matrices' owners, in `ns_dtype`; they send back the orthogonal factors, which each applies to its own parts. An
owner sums squares again over all it has received: in chunks of the whole matrix, so that it has the bits of a rank that
never cut it. Rounds are on their way while their neighbours are orthogonalized (`in_pipeline`).

All ranks make the same rounds in the same order; which records on a disk a rank has, and how many, is its own affair.
So rounds hang on records (`in_rounds`): each comes as soon as all averages that this rank has of it have moved, and
records of masters and remainders as soon as all of their matrices have come back. A rank that has nothing of a round
makes it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.comm import Group, during
from zerokern.core.errors import CommError
from zerokern.optim.matrices import Matrix, MatrixPart, is_cut, part_of
from zerokern.zero.partition import deal_rounds, round_places

__all__ = ["Round", "UnderWay", "in_pipeline", "in_rounds", "places_of", "rounds_of", "together"]

UnderWay = Generator[None, Callable[[], None], None]
"""A round that has been begun; it is sent what `in_pipeline` does in the middle of its iteration."""


@contextmanager
def together(groups: Sequence[Group]) -> Iterator[None]:
    """Around what these ranks make of an update together: where it fails on one, it ends on all. They wait for it."""
    try:
        yield
    except BaseException as error:
        for group in groups if not isinstance(error, CommError) else ():
            group.fail(f"opt.step failed here: {error}")
        raise


class Round(NamedTuple):
    """Matrices that are orthogonalized beside each other: the first belongs to rank 0, the next to rank 1, and so on.

    `rows`: of a table, one for each.
    """

    group: Group
    dtype: torch.dtype
    rows: Sequence[int]
    matrices: Sequence[Matrix]

    @property
    def own(self) -> Matrix:
        """The matrix that this rank orthogonalizes; one without elements, where none is left for it."""
        rank, nothing = self.group.rank, Matrix(0, 0, 0, 0, ends=(0,) * self.group.size)
        return self.matrices[rank] if rank < len(self.matrices) else nothing

    @property
    def numel(self) -> int:
        """The elements in memory here: of this rank's matrix, and of its parts of the others."""
        others = sum(one.numel for rank, one in enumerate(self.matrices) if rank != self.group.rank)
        return others + self.own.full_numel

    def divide(self, memory: Tensor, apart: Mapping[int, Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns in this memory the matrix of this rank, 1-D; by rank, this one's part of that rank's matrix; and, by
        rank, that one's part of this one's.

        Its part of its own matrix lies in its place there. `apart`: by rank, parts with memory of their own.
        """
        size, own, parts = self.group.size, self.own, []
        matrix, at = memory[: own.full_numel], own.full_numel
        mine = [matrix[own.span(rank)] for rank in range(size)]
        for rank, one in enumerate(self.matrices):
            if rank == self.group.rank:
                parts.append(mine[rank])
            elif rank in apart:
                parts.append(apart[rank])
            else:
                parts.append(memory[at : at + one.numel])
                at += one.numel
        return matrix, parts + [matrix[:0]] * (size - len(parts)), mine

    def exchange(self, receives: list[Tensor], sends: list[Tensor], what: str) -> Callable[[], None]:
        """Begins to send by rank; returns what waits for it: on a CPU the host, on a device the current stream."""
        about = f"{what} of {', '.join(one.name for one in self.matrices)}"
        with during("opt.step", of=about):
            handle = self.group.all_to_all(receives, sends)

        def wait() -> None:
            with during("opt.step", of=about):
                handle.wait()

        return wait


def rounds_of(rows: Sequence[tuple[int, Matrix, torch.dtype]]) -> list[Round]:
    """Divides rows into rounds, the same on all ranks.

    Of matrices with equal work names decide which comes first, and not the order of the rows, which is that in which
    each rank lists its parameters.

    >>> import torch
    >>> group = Group(0, 2, torch.device("cpu"), "two")
    >>> some = [Matrix(0, 8, height, 4, "", (8, 4 * height), group) for height in (4, 8, 8)]
    >>> [one.rows for one in rounds_of([(row, one, torch.float32) for row, one in enumerate(some)])]
    [[1, 2], [0]]
    """
    kinds: dict[tuple[Any, torch.dtype], list[tuple[int, Matrix]]] = {}
    for row, one, dtype in rows:
        kinds.setdefault((one.group, dtype), []).append((row, one))
    found = []
    for (group, dtype), mine in sorted(kinds.items(), key=lambda kind: (kind[0][0].name, str(kind[0][1]))):
        for some in deal_rounds(mine, group.size, order=lambda pair: pair[1].order):
            found.append(Round(group, dtype, [row for row, _ in some], [one for _, one in some]))
    return found


def in_pipeline(rounds: Sequence[Round], begin: Callable[[Round, int], UnderWay]) -> None:
    """Makes rounds, each of which is on its way while its neighbours are orthogonalized; two at a time are in memory.

    `begin` returns a round that lies in memory from this byte on. It begins its gather up to where it first yields;
    then it waits for that, calls what it was sent in the middle of its iteration, and begins the way back, up to where
    it yields again; then it waits for that. In the middle of an iteration the round before it has come back, and the
    one after it sets off, in the same memory: so one half of the iteration hides the way back, and the other the way
    there. The order of collectives is that of the rounds alone, whatever a rank has of them: there 0, there 1, back 0,
    there 2, back 1, and so on.

    >>> group, said = Group(0, 2, torch.device("cpu"), "two"), []
    >>> some = [Matrix(0, 8, 4, 4, name, (8, 16), group) for name in "abcde"]
    >>> def begin(one, at):
    ...     name = one.matrices[0].name
    ...     said.append(f"there {name}"); halfway = yield
    ...     halfway(); said.append(f"back {name}"); yield
    ...     said.append(f"{name} is here")
    >>> in_pipeline(rounds_of([(row, one, torch.float32) for row, one in enumerate(some)]), begin); said
    ['there a', 'there c', 'back a', 'a is here', 'there e', 'back c', 'c is here', 'back e', 'e is here']
    """
    places = 0, places_of(rounds)[0]
    under_way: list[UnderWay] = []

    def send(number: int) -> None:
        under_way.append(begin(rounds[number], places[number % 2]))
        next(under_way[number])

    def halfway(number: int) -> None:
        if number:
            next(under_way[number - 1], None)
        if number + 1 < len(rounds):
            send(number + 1)

    try:
        for number in range(len(rounds)):
            if not number:
                send(number)
            under_way[number].send(partial(halfway, number))
        for one in under_way[-1:]:
            next(one, None)
    finally:
        under_way.clear()  # a round that failed would hold those beside it, and their memory, in a cycle


def places_of(rounds: Sequence[Round]) -> tuple[int, int]:
    """Returns where in memory every second round lies, behind the others, and where it ends (`in_pipeline`)."""
    nbytes = [one.numel * one.dtype.itemsize for one in rounds]
    even, odd = (max(some, default=0) for some in (nbytes[::2], nbytes[1::2]))
    return round_places(even, odd, len(rounds) > 1)


def in_rounds(batches: Sequence[Any], matrices: Sequence[Sequence[Matrix]], dtypes: Sequence[torch.dtype]) -> list[Any]:
    """Returns the batches (`RowBatch`) of an update in the order in which it passes them.

    Batches without a record have a row for each cut matrix: these go to the batches after whose other rows their rounds
    are made. So that all ranks have one order of collectives, rounds come one by one here, each in a batch of its own.
    `matrices`, `dtypes`: of each parameter, and what these are orthogonalized in.
    """
    made: list[Any] = []
    for _, some in groupby(batches, key=lambda batch: min(batch.turns)):
        turn = list(some)
        cut = [member for batch in turn for member in batch.members if is_cut(member[1])]
        if not cut:
            made += turn
            continue
        # they are in one bucket, alone
        loose = next(batch for batch in turn if batch.record is None)
        loose.params = list({id(rest): rest for batch in turn for rest in batch.params}.values())
        records = [batch for batch in turn if batch.record is not None]
        parts = [[part_of(matrices[i], place) for i, place in batch.members if not is_cut(place)] for batch in records]
        rounds = rounds_of([(at, one, dtypes[i]) for at, (i, one) in enumerate(cut) if one.full_numel])
        for number, rows in _walk(parts, rounds):
            batch = replace(loose, members=[]) if number is None else records[number]
            batch.members = [*batch.members, *(cut[row] for row in rows)]
            batch.turns = [loose.turns[0]] * len(batch.members)
            made.append(batch)
    return made


def _walk(records: Sequence[Sequence[MatrixPart]], rounds: Sequence[Round]) -> list[tuple[int | None, Sequence[int]]]:
    """Returns the order of records and rounds: the number of a record, or None, and rows of the round after it."""
    averages = [{id(part.matrix) for part in parts if part.averages} for parts in records]
    applies = [{id(part.matrix) for part in parts if part.applies} for parts in records]
    order: list[tuple[int | None, Sequence[int]]] = []
    waiting, back = list(range(len(records))), set()
    for one in rounds:
        mine = set(map(id, one.matrices))
        back |= mine
        order += [(number, ()) for number in waiting if averages[number] & mine]
        last = order.pop()[0] if order and not order[-1][1] else None
        order.append((last, one.rows))
        order += [(number, ()) for number in waiting if applies[number] and applies[number] <= back]
        passed = {number for number, _ in order}
        waiting = [number for number in waiting if number not in passed]
    assert not waiting
    return order
