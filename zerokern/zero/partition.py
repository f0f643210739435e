"""Which rank owns which elements: parameters into buckets, buckets into equal shards. And what a stage shards: one
number against the stage at which a thing begins to be divided. Pure arithmetic, no torch.

A parameter lies in one piece in its bucket, so that it can be a view. Optimizer state is counted in blocks of 128 from
a parameter's element 0, so a cut between two ranks falls on a multiple of 128 within the parameter that it crosses:
such a parameter begins at a multiple of 128, up to 127 elements after the one before it. Nothing else is padded: within
a bucket parameters are in order of the power of two that divides their size, so that each begins aligned to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerokern.core.errors import got
from zerokern.core.units import BLOCK

__all__ = [
    "STAGES",
    "Bucket",
    "Member",
    "Piece",
    "check_stage",
    "partition",
    "shards_gradients",
    "shards_parameters",
    "shards_state",
]


@dataclass(frozen=True)
class Member:
    """What of a parameter decides where it goes."""

    numel: int
    dtype: str
    unit: int = 0
    trainable: bool = True
    ranks: int = 0  # which of several groups of ranks divides it
    most: int = 0  # elements on the rank that has most, where others have another part of it


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a parameter, at `offset` of a bucket."""

    param: int
    start: int
    numel: int
    offset: int


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

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    @cached_property
    def padding(self) -> int:
        """Elements of the bucket that belong to no parameter."""
        return self.padded_numel - sum(place.numel for place in self.places)

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
    kinds: dict[tuple[int, str, bool, int], list[int]] = {}
    for number, member in enumerate(members):
        kinds.setdefault((member.unit, member.dtype, member.trainable, member.ranks), []).append(number)
    buckets: list[Bucket] = []
    for (unit, dtype, trainable, ranks), numbers in sorted(kinds.items(), key=lambda kind: kind[0][0]):
        for some in _capped(members, numbers, bucket_numel):
            shard_numel, places = _place(members, some, worlds[ranks])
            buckets.append(Bucket(len(buckets), unit, dtype, trainable, worlds[ranks], shard_numel, places, ranks))
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
