"""Which rank owns which elements: parameters into buckets, buckets into equal shards. And what a stage shards: one
number against the stage at which a thing begins to be divided. Pure arithmetic, no torch.

A parameter lies in one piece in its bucket, so that it can be a view. Optimizer state is counted in blocks of 128 from
a parameter's element 0, so a cut between two ranks falls on a multiple of 128 within the parameter that it crosses:
such a parameter begins at a multiple of 128, up to 127 elements after the one before it. Nothing else is padded: within
a bucket parameters are in order of the power of two that divides their size, so that each begins aligned to its own.

Matrices that are updated whole (Muon's) are never cut. They have buckets of their own, each of as many matrices as it
takes to fill its shards evenly; within a bucket the shards are dealt out so that the work of all updates is even, too.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from zerokern.core.errors import got
from zerokern.core.units import BLOCK, SMALL_GRADIENT, Piece

__all__ = [
    "STAGES",
    "Bucket",
    "Member",
    "Piece",
    "check_stage",
    "deal_rounds",
    "partition",
    "round_places",
    "shards_gradients",
    "shards_parameters",
    "shards_state",
    "sides_of",
    "work_of",
]


_ALIGNED = 64  # bytes: each round of matrices begins at a line of a cache
_T = TypeVar("_T")


@dataclass(frozen=True)
class Member:
    """What of a parameter decides where it goes."""

    numel: int
    dtype: str
    unit: int = 0
    trainable: bool = True
    ranks: int = 0  # which of several groups of ranks divides it
    most: int = 0  # elements on the rank that has most, where others have another part of it
    work: int = 0  # of its update, where one rank makes all of it; 0: it may be cut


@dataclass(frozen=True)
class Bucket:
    """Parameters of one unit and dtype side by side, cut into `world` equal shards."""

    index: int
    unit: int
    dtype: str
    trainable: bool
    world: int
    shard_numel: int
    places: tuple[Piece, ...]
    ranks: int = 0
    whole: bool = False  # matrices that are not cut

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    @cached_property
    def padding(self) -> int:
        """Elements of the bucket that belong to no parameter."""
        return self.padded_numel - sum(place.numel for place in self.places)

    def arrives_at_once(self, itemsize: int, device: str) -> bool:
        """Whether its gradients are copied into its buffer together, once all have arrived: on a device one launch
        copies them, and on a CPU one call copies small ones."""
        return device != "cpu" or all(place.numel * itemsize <= SMALL_GRADIENT for place in self.places)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What of each parameter rank owns, at offsets within its shard; parameters it owns nothing of are left out.

        >>> (bucket,) = partition([Member(200, "float32")], world=2, bucket_numel=None)
        >>> bucket.pieces(0), bucket.pieces(1)
        ((Piece(param=0, start=0, numel=128, offset=0),), (Piece(param=0, start=128, numel=72, offset=0),))
        """
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        spans = ((at, max(at.offset, begin), min(at.offset + at.numel, end)) for at in self.places)
        return tuple(Piece(at.param, a - at.offset, b - a, a - begin) for at, a, b in spans if a < b)


def partition(members: Sequence[Member], world: int | Sequence[int], bucket_numel: int | None = None) -> list[Bucket]:
    """Buckets of at most `bucket_numel` elements (of one parameter at least), in the order of the units.

    The same members give the same buckets on every rank. `world`: of how many, of each group where there are several.

    >>> [(b.unit, b.padded_numel) for b in partition([Member(256, "float32", unit) for unit in (0, 0, 1)], world=2)]
    [(0, 512), (1, 256)]
    """
    worlds = [world] if isinstance(world, int) else world
    kinds: dict[tuple[int, str, bool, int, bool], list[int]] = {}
    for number, member in enumerate(members):
        kind = member.unit, member.dtype, member.trainable, member.ranks, member.work > 0
        kinds.setdefault(kind, []).append(number)
    buckets: list[Bucket] = []
    loads = [[0] * size for size in worlds]
    for (unit, dtype, trainable, ranks, whole), numbers in sorted(kinds.items(), key=lambda kind: kind[0][0]):
        size = worlds[ranks]
        groups = _even(members, numbers, size, bucket_numel) if whole else _capped(members, numbers, bucket_numel)
        for some in groups:
            if isinstance(some, _MatrixGroup):
                shard_numel, places = _deal(members, some, loads[ranks])
            else:
                shard_numel, places = _place(members, some, size)
            buckets.append(Bucket(len(buckets), unit, dtype, trainable, size, shard_numel, places, ranks, whole))
    return buckets


def _capped(members: Sequence[Member], numbers: Sequence[int], bucket_numel: int | None) -> Iterator[list[int]]:
    some: list[int] = []
    held = 0
    for number in numbers:
        numel = members[number].most or members[number].numel
        if some and bucket_numel is not None and held + numel > bucket_numel:
            yield some
            some, held = [], 0
        some.append(number)
        held += numel
    yield some


def _alignment(numel: int) -> int:
    """The largest power of two, up to a block, that divides numel."""
    return min(numel & -numel, BLOCK) if numel else BLOCK


def _place(members: Sequence[Member], numbers: Sequence[int], world: int) -> tuple[int, tuple[Piece, ...]]:
    """The smallest shard, in blocks, into which they go, and where each lies."""
    order = sorted(numbers, key=lambda number: -_alignment(members[number].numel))
    total = sum(members[number].numel for number in order)
    blocks = max(1, -(-total // (world * BLOCK)))
    while True:
        shard_numel = blocks * BLOCK
        places, end = _lay_out(members, order, shard_numel)
        if end <= shard_numel * world:
            return shard_numel, places
        # padding at cuts pushed the end out: as much room more as is missing, at least one block
        blocks += max(1, (end - shard_numel * world) // (world * BLOCK))


def _lay_out(members: Sequence[Member], order: Sequence[int], shard_numel: int) -> tuple[tuple[Piece, ...], int]:
    places = []
    at = 0
    for number in order:
        numel = members[number].numel
        crosses = numel and at // shard_numel != (at + numel - 1) // shard_numel
        if crosses and at % BLOCK:
            at += -at % BLOCK
        places.append(Piece(number, 0, numel, at))
        at += numel
    return tuple(places), at


_PADDING = 1 / 128  # of all elements: with less, shards of whole matrices count as even
_UNEVEN = 1 / 20  # of the average work that a rank has more than it
_PADDING_FOR_WORK = 1 / 32  # of all elements: what is sent more so that no rank has


class _MatrixGroup(NamedTuple):
    """Whole matrices of a bucket. `most_work`: of those in one shard, as far as shards may be uneven for that."""

    numbers: list[int]
    most_work: float = math.inf


def _even(members: Sequence[Member], numbers: Sequence[int], world: int, most: int | None) -> list[_MatrixGroup]:
    """Puts whole matrices into buckets whose shards they fill evenly; the order is that of each bucket's first.

    Equal matrices go together, as many of them to one rank as to another. Those that are left over share a bucket, with
    the last of the other buckets, or with more and more of them, until its shards are even, too. If some rank then has
    clearly more work than others, shards with much work have fewer elements, where few more are sent for that.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        kinds.setdefault((members[number].numel, members[number].work), []).append(number)
    groups: list[list[int]] = []
    left: list[int] = []
    for (numel, _), some in kinds.items():
        full = len(some) // world * world
        step = world * max(1, (most or 0) // (world * max(1, numel)))
        groups += [some[begin : min(begin + step, full)] for begin in range(0, full, step)]
        left += some[full:]
    groups.sort(key=min)
    if not left:
        return [_MatrixGroup(some) for some in groups]
    return sorted(_with_left(members, groups, left, world), key=lambda group: min(group.numbers))


def _with_left(members: Sequence[Member], groups: list[list[int]], left: list[int], world: int) -> list[_MatrixGroup]:
    """Returns the buckets and one more of what is left over."""
    everyone = [number for some in (*groups, left) for number in some]
    numel, work = (sum(getattr(members[number], what) for number in everyone) for what in ("numel", "work"))
    last = {(members[some[0]].numel, members[some[0]].work): place for place, some in enumerate(groups)}
    joins: list[Sequence[int]] = [(), *((place,) for place in reversed(last.values()))]
    counts = (min(2**power, len(groups)) for power in range(len(groups).bit_length() + 1))
    joins += [range(len(groups) - count, len(groups)) for count in counts]
    most = (1 + _UNEVEN) * work / world

    def joined(join: Sequence[int], limit: float) -> tuple[int, float, list[_MatrixGroup]]:
        """Returns the padding, the most work of a rank, and the buckets."""
        some = sorted(left + [number for place in join for number in groups[place]])
        own = sum(members[number].work for number in some)
        elsewhere = (work - own) / world  # on each rank
        group = _MatrixGroup(some, limit - elsewhere)
        bins = _bins(members, group, world)
        padding = max(_sums(members, bins, "numel")) * world - sum(members[number].numel for number in some)
        others = [_MatrixGroup(of) for place, of in enumerate(groups) if place not in join]
        return padding, max(_sums(members, bins, "work")) + elsewhere, [*others, group]

    best = joined((), math.inf)
    for join in joins[1:]:
        if best[0] <= _PADDING * numel:
            break
        best = min(best, joined(join, math.inf), key=operator.itemgetter(0))
    if best[1] > most >= max(members[number].work for number in everyone):
        others = (joined(join, most) for join in joins)
        best = next((one for one in others if one[1] <= most and one[0] <= _PADDING_FOR_WORK * numel), best)
    return best[2]


def _sums(members: Sequence[Member], bins: Sequence[Sequence[int]], what: str) -> list[int]:
    return [sum(getattr(members[number], what) for number in mine) for mine in bins]


def _bins(members: Sequence[Member], group: _MatrixGroup, world: int) -> list[list[int]]:
    """Divides matrices among as many shards, so that the fullest holds little.

    The largest come first, each to the shard that holds least; or, where that is better, to the fullest that has room
    for it, with the least room for which all find some (Coffman, Garey and Johnson's MULTIFIT).
    """
    order = sorted(group.numbers, key=lambda number: -members[number].numel)
    if group.most_work < math.inf:
        return _limited(members, order, world, group.most_work)
    bins: list[list[int]] = [[] for _ in range(world)]
    held = [(0, one) for one in range(world)]
    for number in order:
        numel, one = held[0]
        bins[one].append(number)
        heapq.heapreplace(held, (numel + members[number].numel, one))
    high, total = max(held)[0], sum(members[number].numel for number in order)
    low = max(-(-total // world), members[order[0]].numel)
    while low < high:
        room = (low + high) // 2
        found = _fit(members, order, world, room)
        if found is None:
            low = room + 1
        else:
            bins, high = found, room
    return bins


def _fit(members: Sequence[Member], order: Sequence[int], world: int, room: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(world)]
    free = [(room, one) for one in range(world)]  # sorted
    for number in order:
        numel = members[number].numel
        place = bisect_left(free, (numel, 0))
        if place == world:
            return None
        left, one = free.pop(place)
        bins[one].append(number)
        insort(free, (left - numel, one))
    return bins


def _limited(members: Sequence[Member], order: Sequence[int], world: int, most_work: float) -> list[list[int]]:
    """Gives each to the shard that holds least, unless that would have more work than this; then to the next one.

    What has room in none goes to the one with least work.
    """
    bins: list[list[int]] = [[] for _ in range(world)]
    works = [0] * world
    held = [(0, one) for one in range(world)]
    for number in order:
        full = []
        while held and works[held[0][1]] + members[number].work > most_work:
            full.append(heapq.heappop(held))
        if held:
            numel, one = heapq.heappop(held)
        else:
            numel, one = full.pop(min(range(len(full)), key=lambda at: works[full[at][1]]))
        bins[one].append(number)
        works[one] += members[number].work
        for again in (*full, (numel + members[number].numel, one)):
            heapq.heappush(held, again)
    return bins


def _deal(members: Sequence[Member], group: _MatrixGroup, loads: list[int]) -> tuple[int, tuple[Piece, ...]]:
    """Lays a bucket out whose matrices are not cut. The shard with most work is that of the rank with least so far.

    `loads`: the work of each rank, to which this is added.
    """
    bins = _bins(members, group, len(loads))
    bins.sort(key=lambda mine: -sum(members[number].work for number in mine))
    largest = max(sum(members[number].numel for number in mine) for mine in bins)
    shard_numel = max(1, -(-largest // BLOCK)) * BLOCK
    places = []
    for rank, mine in zip(sorted(range(len(loads)), key=loads.__getitem__), bins, strict=True):
        at = rank * shard_numel
        for number in sorted(mine, key=lambda number: -_alignment(members[number].numel)):
            places.append(Piece(number, 0, members[number].numel, at))
            at += members[number].numel
            loads[rank] += members[number].work
    return shard_numel, tuple(sorted(places, key=operator.attrgetter("offset")))


def sides_of(shape: Sequence[int], split: int = 1) -> tuple[int, int]:
    """Returns the rows and columns of the matrices, `split` of them, that a parameter of this shape consists of.

    >>> sides_of([12, 4], 3), sides_of([8, 6, 4], 8)
    ((4, 4), (6, 4))
    """
    return math.prod(shape[:-1]) // split, shape[-1]


def deal_rounds(matrices: Iterable[_T], ranks: int, order: Callable[[_T], Any]) -> list[list[_T]]:
    """Returns rounds of as many matrices as there are ranks. Those with most work come first (`order`), so that ranks
    wait for each other, over all rounds, for no longer than the first one takes.

    >>> deal_rounds([4, 9, 7], 2, order=operator.neg)
    [[9, 7], [4]]
    """
    ranked = sorted(matrices, key=order)
    return [ranked[at : at + ranks] for at in range(0, len(ranked), ranks)]


def round_places(even: int, odd: int, several: bool) -> tuple[int, int]:
    """Returns where in memory every second round lies, behind the others, and where it ends. `even`, `odd`: bytes of
    the largest of each kind.

    >>> round_places(100, 60, several=True), round_places(100, 0, several=False)
    ((128, 188), (100, 100))
    """
    second = -(-even // _ALIGNED) * _ALIGNED if several else even
    return second, second + odd


def work_of(shape: Sequence[int], split: int = 1) -> int:
    """Returns how much work it is to orthogonalize a matrix, in proportion: its iteration multiplies the smaller side.

    `split`: it consists of so many along the first dimension, of which each is orthogonalized by itself.

    >>> work_of([2, 4]) == work_of([4, 2]), work_of([4, 4]) / work_of([2, 2]), work_of([8, 4], 2) == 2 * work_of([4, 4])
    (True, 8.0, True)
    """
    small, large = sorted(sides_of(shape, split))
    return split * small * small * (2 * large + small)


STAGES = (0, 1, 2, 3)


def check_stage(stage: object) -> int:
    """
    >>> check_stage(3)
    3
    """
    if isinstance(stage, bool) or stage not in STAGES:
        allowed = "0 (all is replicated), 1 (optimizer state is sharded), 2 (gradients too) or 3 (parameters too)"
        raise ValueError(got("stage", stage, allowed))
    return int(stage)


def shards_state(stage: int) -> bool:
    """
    >>> [shards_state(stage) for stage in STAGES]
    [False, True, True, True]
    """
    return stage >= 1


def shards_gradients(stage: int) -> bool:
    """
    >>> [shards_gradients(stage) for stage in STAGES]
    [False, False, True, True]
    """
    return stage >= 2


def shards_parameters(stage: int) -> bool:
    """
    >>> [shards_parameters(stage) for stage in STAGES]
    [False, False, False, True]
    """
    return stage >= 3
