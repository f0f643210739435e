"""Matrices of which ranks have parts (stage 3): each comes together on one rank, which orthogonalizes it.

It goes round by round, with a matrix for each rank. A rank moves the averages of its own parts, and sends what results
to the matrices' owners, in `ns_dtype`; they send back the orthogonal factors, which each applies to its own parts. An
owner sums squares again over all it has received: in chunks of the whole matrix, so that it has the bits of a rank that
never cut it. Rounds are on their way while their neighbours are orthogonalized (`in_pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokern.comm import Group, Handle, during
from zerokern.core.errors import CommError
from zerokern.zero.partition import shards_parameters, work_of
from zerokern.zero.shard import Shard

__all__ = [
    "CutMatrix", "Round", "RoundUnderWay", "exchange_groups", "in_pipeline", "parts_of_matrices", "rounds_nbytes",
    "rounds_of", "together",
]  # fmt: skip

_ALIGNED = 64  # bytes: each round begins at a line of a cache


class CutMatrix(NamedTuple):
    """A matrix that is cut, and what this rank has of it: `numel` elements, at `start` of what it has of the parameter.

    `ends`: of each rank of the group, where its part of the matrix ends; the next one's begins there.
    """

    start: int
    numel: int
    height: int
    width: int
    name: str
    ends: tuple[int, ...]
    group: Group

    @property
    def order(self) -> tuple[int, str]:
        """Sorts matrices: those with most work come first, and names decide between equals."""
        return -work_of((self.height, self.width)), self.name

    def span(self, rank: int) -> slice:
        """Returns which elements of the matrix a rank has."""
        return slice(self.ends[rank - 1] if rank else 0, self.ends[rank])


def group_of(shard: Shard) -> Group | None:
    """Returns the ranks that have parts of a parameter and bring its matrices together; None: nobody does."""
    bucket = shard.gradients
    if bucket is None or not shards_parameters(shard.sharding.stage) or bucket.group.size == 1:
        return None
    found: Group = bucket.group
    return found


def exchange_groups(shards: Sequence[Shard]) -> list[Group]:
    """Returns the groups of ranks that bring matrices of these parameters together."""
    groups = [group for shard in shards if (group := group_of(shard)) is not None]
    return list({id(group): group for group in groups}.values())


@contextmanager
def together(groups: Sequence[Group]) -> Iterator[None]:
    """Around what these ranks make of an update together: where it fails on one, it ends on all. They wait for it."""
    try:
        yield
    except BaseException as error:
        for group in groups if not isinstance(error, CommError) else ():
            group.fail(f"opt.step failed here: {error}")
        raise


def parts_of_matrices(shard: Shard, matrices: Sequence[Any]) -> list[CutMatrix]:
    """Returns what this rank has of each of a parameter's matrices, whether it has any of it or not."""
    group, bucket = group_of(shard), shard.gradients
    assert group is not None
    offset, each = bucket.entries[shard.place].place.offset, bucket.memory.bucket.shard_numel
    found = []
    for number, one in enumerate(matrices):
        ends = tuple(min(max((rank + 1) * each - offset - one.start, 0), one.numel) for rank in range(group.size))
        begin = ends[group.rank - 1] if group.rank else 0
        numel = ends[group.rank] - begin
        start = one.start + begin - shard.start if numel else 0
        name = shard.name if len(matrices) == 1 else f"{shard.name}[{number}]"
        found.append(CutMatrix(start, numel, one.height, one.width, name, ends, group))
    return found


class Round(NamedTuple):
    """Matrices that are orthogonalized beside each other: the first belongs to rank 0, the next to rank 1, and so on.

    `rows`: of a table, one for each.
    """

    group: Group
    dtype: torch.dtype
    rows: Sequence[int]
    parts: Sequence[CutMatrix]

    @property
    def own(self) -> CutMatrix | None:
        """The matrix that this rank orthogonalizes."""
        rank = self.group.rank
        return self.parts[rank] if rank < len(self.parts) else None

    @property
    def numel(self) -> int:
        """The elements in memory here: of this rank's matrix, and of its parts of the others."""
        others = sum(part.numel for rank, part in enumerate(self.parts) if rank != self.group.rank)
        return others + (0 if self.own is None else self.own.height * self.own.width)

    @property
    def nbytes(self) -> int:
        """The bytes of that."""
        return self.numel * self.dtype.itemsize

    def divide(self, memory: Tensor, apart: Mapping[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns in this memory the matrix of this rank, 1-D, and its parts of all matrices of the round.

        Its part of its own matrix lies in its place there. `apart`: by rank, parts with memory of their own.
        """
        own, found = self.own, []
        at = 0 if own is None else own.height * own.width
        matrix = memory[:at]
        for rank, part in enumerate(self.parts):
            if rank == self.group.rank:
                found.append(matrix[part.span(rank)])
            elif rank in apart:
                found.append(apart[rank])
            else:
                found.append(memory[at : at + part.numel])
                at += part.numel
        return matrix, found

    def by_rank(self, matrix: Tensor, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns by rank what this one has of that rank's matrix, and that rank's part of this one's matrix."""
        size, nothing, own = self.group.size, matrix[:0], self.own
        mine = [nothing] * size if own is None else [matrix[own.span(rank)] for rank in range(size)]
        return [*parts, *[nothing] * (size - len(parts))], mine


class RoundUnderWay:
    """A round in memory: this rank's matrix, 1-D, its parts of all of them, and the exchange that is on its way.

    `apart`: by rank, parts whose averages have moved already, in memory of their own. `here`: rank, row and memory of
    the parts that have elements.
    """

    def __init__(self, one: Round, memory: Tensor, apart: Mapping[int, Tensor]) -> None:
        self.round, self.apart = one, apart
        self.matrix, self._parts = one.divide(memory, apart)
        pairs = enumerate(zip(one.rows, self._parts, strict=True))
        self.here = [(rank, row, part) for rank, (row, part) in pairs if len(part)]
        self._handle = Handle()
        self._about = ""

    def gather(self) -> None:
        """Begins to bring each matrix together on its owner."""
        rank = self.round.group.rank
        if rank in self.apart:
            self._parts[rank].copy_(self.apart[rank])
        of_others, of_own = self.round.by_rank(self.matrix, self._parts)
        self._move(of_own, of_others, "directions")

    def scatter(self) -> None:
        """Begins to divide each matrix between all ranks again."""
        of_others, of_own = self.round.by_rank(self.matrix, self._parts)
        self._move(of_others, of_own, "orthogonal factors")

    def give_back(self) -> None:
        """Puts this rank's part of its own matrix, too, where the parts with memory of their own are."""
        rank = self.round.group.rank
        if rank in self.apart:
            self.apart[rank].copy_(self._parts[rank])

    def _move(self, receives: list[Tensor], sends: list[Tensor], what: str) -> None:
        self._about = f"{what} of {', '.join(part.name for part in self.round.parts)}"
        with during("opt.step", of=self._about):
            self._handle = self.round.group.all_to_all(receives, sends)

    def wait(self) -> None:
        """Waits for the exchange that was begun last: on a CPU the host, on a device the current stream."""
        with during("opt.step", of=self._about):
            self._handle.wait()


def in_pipeline(
    rounds: Sequence[Round],
    send: Callable[[Round, int], RoundUnderWay],
    orthogonalize: Callable[[RoundUnderWay, Callable[[], None]], None],
    receive: Callable[[RoundUnderWay], None],
) -> None:
    """Makes rounds, each of which is on its way while its neighbours are orthogonalized; two at a time are in memory.

    `send` begins a round's gather, in the memory from this byte on. `orthogonalize` waits for that, calls its second
    argument in the middle of the iteration, and begins the way back, for which `receive` waits. In the middle of an
    iteration the round before it has come back, and the one after it sets off, in the same memory: so one half of the
    iteration hides the way back, and the other the way there. The order of collectives is that of the rounds alone,
    whatever a rank has of them: there 0, there 1, back 0, there 2, back 1, and so on.

    >>> group, said = Group(0, 2, torch.device("cpu"), "two"), []
    >>> parts = [CutMatrix(0, 8, 4, 4, name, (8, 16), group) for name in "abcde"]
    >>> def send(one, at):
    ...     said.append(f"there {one.parts[0].name}"); return one.parts[0].name
    >>> def orthogonalize(name, halfway):
    ...     halfway(); said.append(f"back {name}")
    >>> rounds = rounds_of([(row, part, torch.float32) for row, part in enumerate(parts)])
    >>> in_pipeline(rounds, send, orthogonalize, lambda name: said.append(f"{name} is here")); said
    ['there a', 'there c', 'back a', 'a is here', 'there e', 'back c', 'c is here', 'back e', 'e is here']
    """
    places = 0, _second_place(rounds)
    under_way = [send(one, places[0]) for one in rounds[:1]]

    def halfway(number: int) -> None:
        if number:
            receive(under_way[number - 1])
        if number + 1 < len(rounds):
            under_way.append(send(rounds[number + 1], places[(number + 1) % 2]))

    for number in range(len(rounds)):
        orthogonalize(under_way[number], partial(halfway, number))
    for one in under_way[-1:]:
        receive(one)


def rounds_nbytes(rounds: Sequence[Round]) -> int:
    """Returns how many bytes rounds take that are made by `in_pipeline`: those of two, or of one."""
    return _second_place(rounds) + max((one.nbytes for one in rounds[1::2]), default=0)


def _second_place(rounds: Sequence[Round]) -> int:
    """Returns where in memory every second round lies, behind the others."""
    largest = max((one.nbytes for one in rounds[::2]), default=0)
    return -(-largest // _ALIGNED) * _ALIGNED if len(rounds) > 1 else largest


def rounds_of(rows: Sequence[tuple[int, CutMatrix, torch.dtype]]) -> list[Round]:
    """Divides rows into rounds, the same on all ranks.

    Those with most work come first, as many at a time as there are ranks. So ranks wait for each other, over all
    rounds, for no longer than the first one takes. Names decide between equals, and not the order of the rows, which is
    that in which each rank lists its parameters.

    >>> import torch
    >>> group = Group(0, 2, torch.device("cpu"), "two")
    >>> parts = [CutMatrix(0, 8, height, 4, "", (8, 4 * height), group) for height in (4, 8, 8)]
    >>> [one.rows for one in rounds_of([(row, part, torch.float32) for row, part in enumerate(parts)])]
    [[1, 2], [0]]
    """
    kinds: dict[tuple[int, torch.dtype], list[tuple[int, CutMatrix]]] = {}
    for row, part, dtype in rows:
        kinds.setdefault((id(part.group), dtype), []).append((row, part))
    found = []
    for (_, dtype), mine in sorted(kinds.items(), key=lambda kind: (kind[1][0][1].group.name, str(kind[0][1]))):
        group = mine[0][1].group
        mine.sort(key=lambda pair: pair[1].order)
        for some in (mine[at : at + group.size] for at in range(0, len(mine), group.size)):
            found.append(Round(group, dtype, [row for row, _ in some], [part for _, part in some]))
    return found
