"""Buckets as the planner counts them: how many elements, of which rank 0 has how many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zerokern.core.units import BLOCK
from zerokern.planner.recipe import itemsize

if TYPE_CHECKING:
    from zerokern.zero.partition import Bucket

__all__ = ["Buckets", "Load"]

_ADDED = ("count", "numel", "blocks", "padded_numel", "shard_numel", "own_numel", "own_blocks")


@dataclass(frozen=True)
class Load:
    """A bucket, or `count` of them together: elements of parameters and with padding, of all ranks and of rank 0.

    `blocks` are those of the int8 state. `largest_numel`: padded elements of the largest of the buckets.
    """

    unit: int
    dtype: str
    trainable: bool
    numel: int
    blocks: int
    padded_numel: int
    shard_numel: int
    own_numel: int
    own_blocks: int
    largest_numel: int
    count: int = 1

    @classmethod
    def of(cls, bucket: Bucket) -> Load:
        """A bucket of the partition."""
        own, places = bucket.pieces(0), bucket.places
        return cls(
            bucket.unit,
            bucket.dtype,
            bucket.trainable,
            sum(place.numel for place in places),
            sum(-(-place.numel // BLOCK) for place in places),
            bucket.padded_numel,
            bucket.shard_numel,
            sum(piece.numel for piece in own),
            sum(-(-piece.numel // BLOCK) for piece in own),
            bucket.padded_numel,
        )

    @classmethod
    def bare(cls, numel: int, dtype: str, world: int, bucket_bytes: int) -> Load:
        """So many elements in no tensors, in buckets as large as they may be.

        >>> load = Load.bare(7_500_000_000, "bfloat16", 64, 32 << 20)
        >>> load.shard_numel, load.padded_numel - load.numel, load.largest_numel * 2 >> 20, load.count
        (117187584, 5376, 32, 448)
        """
        blocks = -(-numel // BLOCK)
        own_blocks = -(-blocks // world)
        shard = own_blocks * BLOCK
        cut = world * BLOCK
        largest = min(shard * world, -(-bucket_bytes // itemsize(dtype) // cut) * cut)
        own = min(shard, numel)
        count = -(-shard * world // largest)
        return cls(0, dtype, True, numel, blocks, shard * world, shard, own, own_blocks, largest, count)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.padded_numel * self.itemsize


@dataclass(frozen=True)
class Buckets:
    """All buckets of a model at a stage, in the order of the units."""

    loads: tuple[Load, ...]

    @cached_property
    def kinds(self) -> list[Load]:
        """One for each dtype, and for what is trained and what is frozen: bytes are linear in all but the largest."""
        groups: dict[tuple[str, bool], list[Load]] = {}
        for load in self.loads:
            groups.setdefault((load.dtype, load.trainable), []).append(load)
        return [_together(loads) for loads in groups.values()]

    @cached_property
    def trained(self) -> list[Load]:
        """The kinds that have gradients."""
        return [kind for kind in self.kinds if kind.trainable]

    @cached_property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(kind.padded_numel - kind.numel for kind in self.kinds)

    @cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of whole parameters at their most: the root's, and of two neighbours, of which one is on its way."""
        units: dict[int, int] = {}
        for load in self.loads:
            units[load.unit] = units.get(load.unit, 0) + load.nbytes
        root, others = units.pop(0, 0), [nbytes for _, nbytes in sorted(units.items())]
        return root + max((sum(others[i : i + 2]) for i in range(len(others))), default=0)


def _together(loads: Sequence[Load]) -> Load:
    first = loads[0]
    sums = {name: sum(getattr(load, name) for load in loads) for name in _ADDED}
    largest = max(load.largest_numel for load in loads)
    return Load(first.unit, first.dtype, first.trainable, largest_numel=largest, **sums)
