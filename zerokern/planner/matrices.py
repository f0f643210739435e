"""What Muon costs beside the bytes of its state: its iteration's flops by rank, its memory, and what is sent for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from zerokern.zero.partition import Bucket, deal_rounds, round_places, sides_of, work_of

__all__ = [
    "CutShape", "Exchange", "Iteration", "MatrixShape", "exchange_of", "iteration_flops", "loads",
    "open_in_backward", "workspace_nbytes",
]  # fmt: skip

_SUMMED_IN = 8  # bytes of a float64 sum of squares


class MatrixShape(NamedTuple):
    """The matrices, `split` of them, that one parameter consists of; each is orthogonalized by itself.

    >>> MatrixShape(2, 4, 3).numel, MatrixShape(2, 4, 3).work == 3 * MatrixShape(4, 2).work
    (24, True)
    """

    rows: int
    columns: int
    split: int = 1

    @classmethod
    def of(cls, shape: Sequence[int], split: int = 1) -> MatrixShape:
        """Returns those of a parameter of this shape that consists of so many along its first dimension.

        >>> MatrixShape.of((12, 4), 3), MatrixShape.of((8, 6, 4), 8)
        (MatrixShape(rows=4, columns=4, split=3), MatrixShape(rows=6, columns=4, split=8))
        """
        return cls(*sides_of(shape, split), split)

    @property
    def numel(self) -> int:
        return self.rows * self.columns * self.split

    @property
    def each(self) -> MatrixShape:
        """One of them."""
        return self._replace(split=1)

    @property
    def work(self) -> int:
        """As the partition counts it."""
        return max(1, work_of((self.rows * self.split, self.columns), self.split))


@dataclass(frozen=True)
class Iteration:
    """Muon's part of a plan at one stage: which parameters are whole matrices, and what their update costs.

    `numel` of `matrices` parameters, with `rest` others for AdamW. `flops`: of all matrices once; `rank_flops`: of the
    rank that has most of them to do in a step. `imbalance`: by what part of the average that is more; 0 where all
    compute all (stage 0). `padding`: elements that are sent because matrices are not cut (stages 1 and 2). `workspace`:
    bytes beside the state while matrices are orthogonalized, one at a time; of those that ranks have parts of (stage 3)
    up to two rounds are in memory, with this rank's parts of others' matrices. `exchanged`: bytes that all ranks
    together send each other in a step because they have parts of matrices (stage 3); `rank_exchanged`: the rank that
    sends most.

    >>> import zerokern as zk
    >>> muon = zk.plan("llama-3-8b", optimizer="muon", world=8).muon
    >>> muon.matrices, muon.rest, f"{muon.rank_flops / muon.flops:.4f}", muon.padding, muon.imbalance
    (224, 67, '0.1250', 0, 0.0)
    """

    dtype: str
    matrices: int
    numel: int
    rest: int
    rest_numel: int
    flops: int
    rank_flops: int
    imbalance: float
    padding: int
    workspace: int
    exchanged: int = 0
    rank_exchanged: int = 0


def loads(works: Sequence[int], buckets: Sequence[Bucket], world: int) -> list[int]:
    """Returns for each rank the work of its matrices, which are not cut. `works`: by parameter, 0 of others.

    >>> from zerokern.zero.partition import Member, partition
    >>> some = [Member(256, "float32", work=1), Member(512, "float32", work=2)]
    >>> loads([1, 2], partition(some, world=2), 2)
    [2, 1]
    """
    found = [0] * world
    for bucket in buckets:
        for place in bucket.places if bucket.trainable else ():
            if works[place.param]:
                found[place.offset // bucket.shard_numel] += works[place.param]
    return found


class CutShape(NamedTuple):
    """A matrix that lies in a bucket from its element `begin` on, of which each rank has `each`.

    `turn`: the place of its parameter among what optimizers update. `bucket`: the number of that.

    >>> one = CutShape(MatrixShape(2, 5), "a", "bfloat16", 0, 0, begin=6, each=8)
    >>> one.numel_of(0), one.numel_of(1), one.numel_of(2)
    (2, 8, 0)
    """

    shape: MatrixShape
    name: str
    dtype: str
    turn: int
    bucket: int
    begin: int
    each: int

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel

    def numel_of(self, rank: int) -> int:
        """Returns how many of its elements a rank has."""
        return max(0, min(self.end, (rank + 1) * self.each) - max(self.begin, rank * self.each))

    @property
    def parts(self) -> dict[int, int]:
        """How many of its elements each rank has that has any."""
        ranks = range(self.begin // self.each, (self.end - 1) // self.each + 1)
        return {rank: self.numel_of(rank) for rank in ranks}


class Exchange(NamedTuple):
    """What rounds of matrices of which ranks have parts ask of them.

    `work`: on the rank that has the largest of each round. `sent`: the elements that each rank sends in a step: its
    parts of others' matrices, and the results of its own to the ranks that have parts of them. `nbytes`: of rounds in
    memory, on the rank with most: its matrix of each, and its parts of the others.
    """

    work: int
    sent: list[int]
    nbytes: int


def exchange_of(
    matrices: Sequence[CutShape],
    world: int,
    itemsize: int,
    *,
    pairs: bool,
    turns: bool,
    weigh: Callable[[MatrixShape], int] = attrgetter("work"),
) -> Exchange:
    """Returns what rounds of as many matrices as there are ranks ask for, those with most work first.

    `pairs`: two rounds at a time are in memory, of which one is on its way. `turns`: buckets are updated one by one.
    `weigh`: what counts as work of a matrix.

    >>> some = [CutShape(MatrixShape(4, 8), "a", "float32", n, 0, begin=16, each=32) for n in range(4)]  # 16 and 16
    >>> exchange_of(some, 2, 4, pairs=True, turns=False)._replace(work=0)  # of 48 elements each
    Exchange(work=0, sent=[64, 64], nbytes=384)
    """
    in_turns: dict[int, list[CutShape]] = {}
    for one in matrices:
        in_turns.setdefault(one.bucket if turns else 0, []).append(one)
    work, sent, largest = 0, [0] * world, 0
    for some in in_turns.values():
        room = [[0, 0] for _ in range(world)]  # of every second round, and of the others
        rounds = deal_rounds(some, world, order=lambda one: (-one.shape.work, one.name))
        for number, of_round in enumerate(rounds):
            work += max(weigh(one.shape) for one in of_round)
            numels = [one.shape.numel for one in of_round] + [0] * (world - len(of_round))
            for owner, one in enumerate(of_round):
                for rank, part in one.parts.items():
                    if rank != owner:
                        numels[rank] += part
                        sent[rank] += part  # there, what is to be orthogonalized
                        sent[owner] += part  # and back
            place = number % 2 if pairs else 0
            for mine, numel in zip(room, numels, strict=True):
                mine[place] = max(mine[place], numel * itemsize)
        several = pairs and len(rounds) > 1
        largest = max(largest, *(round_places(even, odd, several)[1] for even, odd in room))
    return Exchange(work, sent, largest)


def open_in_backward(buckets: Sequence[Bucket], nbytes: Sequence[int], together: Sequence[bool], *, hosts: bool) -> int:
    """Returns the bytes of the buffers that gradients of these buckets take: buckets of whole matrices stay open until
    gradients of many layers have arrived, last layers first.

    `together`: buckets that take a buffer once all of their gradients have arrived. `hosts`: they are reduced in host
    memory, where only one reduction is under way.

    >>> from zerokern.zero.partition import Member, partition
    >>> each = partition([Member(256, "float32", work=1), Member(512, "float32", work=2)] * 4, world=2, bucket_numel=1)
    >>> open_in_backward(each, [4 * one.padded_numel for one in each], [False] * 4, hosts=True)
    8192
    """
    import torch

    from zerokern.zero.reduction import SharedMemory  # its package needs torch, as other parts of Muon's plans do

    pool = SimpleNamespace(zeros=lambda size, dtype: torch.empty(size, dtype=dtype, device="meta"))
    told = {
        "dtype": torch.uint8,
        "tell": lambda: None,
        "wait": lambda: None,
    }  # a bucket, and the handle of its reduction
    made: list[Any] = [
        SimpleNamespace(number=number, nbytes=size, memory=SimpleNamespace(bucket=one, pool=pool), **told)
        for number, (one, size) in enumerate(zip(buckets, nbytes, strict=True))
    ]
    memory = SharedMemory(made, needs_scratch=False)
    owner = {piece.param: number for number, bucket in enumerate(buckets) for piece in bucket.places}
    missing = [len(bucket.places) for bucket in buckets]
    for param in sorted(owner, reverse=True):
        number = owner[param]
        missing[number] -= 1
        last = missing[number] == 0
        begins = last if together[number] else missing[number] == len(buckets[number].places) - 1
        if begins:
            memory.lend(made[number])
        if last:
            while hosts and memory.outstanding:
                memory.wait_for_oldest()
            memory.outstanding.append((made[number], made[number]))
    return sum(one.nbytes for one in memory.buffers)


def iteration_flops(shape: MatrixShape, dtype: str, form: str, steps: int, coefficients: Sequence[Any] | None) -> int:
    """Returns the floating-point operations of the iteration on the matrices of one parameter.

    >>> iteration_flops(MatrixShape(2, 4), "float32", "standard", 5, None) == 2 * 5 * MatrixShape(2, 4).work
    True
    """
    if form == "gram":
        import torch

        from zerokern.kernels.gram import flops_of, goes_by_gram
        from zerokern.kernels.orthogonal import COEFFICIENTS, each_step

        if steps and goes_by_gram(shape.rows, shape.columns, getattr(torch, dtype)):
            by = each_step(coefficients or COEFFICIENTS, steps)
            return shape.split * flops_of(shape.rows, shape.columns, by)
    return 2 * steps * shape.work  # a product adds as often as it multiplies


def workspace_nbytes(
    shapes: Sequence[MatrixShape], dtype: str, *, form: str = "standard", rounds: int = 0, place: str = "cpu"
) -> int:
    """Returns the bytes of one matrix that is orthogonalized, the largest: itself, its sums of squares, and what the
    iteration needs beside in this form. `rounds`: ranks have parts of matrices, and so many bytes of it and others are
    in memory (`Exchange`). `place`: where they are multiplied, equal small ones at once.

    >>> workspace_nbytes([MatrixShape(10, 4)], "float32") == 4 * (40 + 72) + 8
    True
    """
    if not shapes:
        return 0
    import torch

    from zerokern.kernels.orthogonal import workspace_numel
    from zerokern.kernels.reference import SUMSQ_CHUNK
    from zerokern.optim.matrices import batches_of, most_together

    itemsize = getattr(torch, dtype).itemsize
    each = [(one.split, one.rows, one.columns) for one in shapes for _ in range(one.split)]
    most = most_together(torch.device(place))
    small = [one for one in each if not rounds and 0 < 2 * one[1] * one[2] <= most]
    batches = batches_of(range(len(small)), small.__getitem__, most)
    counts = {one[1:]: 1 for one in each}
    for some in batches:
        size = small[some[0]][1:]
        counts[size] = max(counts[size], len(some))
    multiplied = getattr(torch, dtype)
    room = max(
        workspace_numel(torch.empty(count, *size, dtype=multiplied, device="meta"), form)
        for size, count in counts.items()
    )
    largest = max(count * rows * columns for (rows, columns), count in counts.items())
    chunks = max(count * -(-rows * columns // SUMSQ_CHUNK) for (rows, columns), count in counts.items())
    return (rounds or largest * itemsize) + room * itemsize + _SUMMED_IN * chunks
