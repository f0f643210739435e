"""Describes the model that is planned: its parameters by unit, and the buckets that `zk.shard` would make of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got
from zerokern.core.units import BLOCK, itemsize
from zerokern.planner.amounts import count, parse_numel
from zerokern.planner.recipe import Recipe
from zerokern.planner.transformer import Transformer
from zerokern.schedule.passes import ROOT
from zerokern.zero.partition import shards_parameters, shards_state

if TYPE_CHECKING:
    from zerokern.zero.partition import Bucket, Member

__all__ = ["BucketSize", "Buckets", "ModelSpec", "model_spec"]

_SUMMED = ("count", "numel", "blocks", "padded_numel", "shard_numel", "own_numel", "own_blocks")


@dataclass(frozen=True)
class BucketSize:
    """Counts the elements of a bucket, or of `count` buckets together: of parameters, with padding, and of rank 0.

    `blocks`: of int8 state. `largest_numel`: padded elements of the largest of the buckets.
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
    def of(cls, bucket: Bucket) -> BucketSize:
        """Returns the size of a bucket of the partition."""
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
    def bare(cls, numel: int, dtype: str, world: int, bucket_bytes: int) -> BucketSize:
        """Returns the size of all buckets of a model that is only a number of parameters.

        >>> size = BucketSize.bare(7_500_000_000, "bfloat16", 64, 32 << 20)
        >>> size.shard_numel, size.padded_numel - size.numel, size.largest_numel * 2 >> 20, size.count
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

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.itemsize

    def each(self) -> list[BucketSize]:
        """Returns the buckets that it counts together, one by one.

        >>> [one.numel for one in BucketSize.bare(1000, "float32", 1, 2000).each()]
        [500, 500]
        """
        if self.count == 1:
            return [self]
        found = []
        for number in range(self.count):
            fields: dict[str, Any] = {name: _part(getattr(self, name), number, self.count) for name in _SUMMED}
            found.append(replace(self, **fields))
        return found

    def updated(self, is_sharded: bool) -> tuple[int, int]:
        """Returns the elements and int8 blocks that this rank updates: its own, or all where state is not sharded."""
        return (self.own_numel, self.own_blocks) if is_sharded else (self.numel, self.blocks)


@dataclass(frozen=True)
class Buckets:
    """Holds the sizes of all buckets of a model at a stage, in the order of the units."""

    sizes: tuple[BucketSize, ...]
    in_units: bool = False
    last_unit: int = -1
    """where these are some of a model's, the last unit of that; negative: theirs"""

    def some(self, sizes: Sequence[BucketSize]) -> Buckets:
        """Returns those of the same model that are among these."""
        return Buckets(tuple(sizes), self.in_units, self.beside_root[-1][0].unit if self.beside_root else 0)

    @cached_property
    def kinds(self) -> list[BucketSize]:
        """One sum per dtype, trained and frozen apart: bytes are linear in all but the largest."""
        groups: dict[tuple[str, bool], list[BucketSize]] = {}
        for bucket in self.sizes:
            groups.setdefault((bucket.dtype, bucket.trainable), []).append(bucket)
        return [_together(sizes) for sizes in groups.values()]

    @cached_property
    def trained(self) -> list[BucketSize]:
        """The kinds that have gradients."""
        return [kind for kind in self.kinds if kind.trainable]

    @cached_property
    def root(self) -> list[BucketSize]:
        """The buckets of no unit, in a model that has units."""
        return [bucket for bucket in self.sizes if bucket.unit == ROOT and self.in_units]

    @cached_property
    def by_unit(self) -> list[list[BucketSize]]:
        """The buckets of each unit."""
        return [list(sizes) for _, sizes in groupby(self.sizes, key=lambda bucket: bucket.unit)]

    @cached_property
    def beside_root(self) -> list[list[BucketSize]]:
        """The buckets of each unit that is gathered and resharded by itself; all buckets if units are unknown."""
        return [sizes for sizes in self.by_unit if sizes[0].unit != ROOT or not self.in_units]

    @cached_property
    def last_unit_nbytes(self) -> int:
        """Bytes of this rank's shard of the last unit; 0 if units are unknown."""
        last = self.beside_root[-1:] if self.in_units else []
        if self.last_unit >= 0:
            last = [sizes for sizes in last if sizes[0].unit == self.last_unit]
        return sum(bucket.shard_nbytes for bucket in chain(*last))

    @cached_property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(kind.padded_numel - kind.numel for kind in self.kinds)

    @cached_property
    def gathered_nbytes(self) -> int:
        """The most bytes of unsharded parameters at a time: the root and two neighbours, one being prefetched."""
        units: dict[int, int] = {}
        for bucket in self.sizes:
            units[bucket.unit] = units.get(bucket.unit, 0) + bucket.nbytes
        root, others = units.pop(0, 0), [nbytes for _, nbytes in sorted(units.items())]
        return root + max((sum(others[i : i + 2]) for i in range(len(others))), default=0)


def _part(total: int, number: int, count: int) -> int:
    return total * (number + 1) // count - total * number // count


def _together(sizes: Sequence[BucketSize]) -> BucketSize:
    first = sizes[0]
    sums = {name: sum(getattr(bucket, name) for bucket in sizes) for name in _SUMMED}
    largest = max(bucket.largest_numel for bucket in sizes)
    return BucketSize(first.unit, first.dtype, first.trainable, largest_numel=largest, **sums)


@dataclass(frozen=True)
class ModelSpec:
    """Lists the parameters of a model by unit. `units` is empty if only their number is known.

    `order`: the optimizer's order of the members; empty for their own. `tp`: ranks that hold other parts of each
    parameter, as a module's DTensors say.
    """

    called: str
    members: tuple[Member, ...]
    units: tuple[str, ...]
    bare_numel: int = 0
    dtype: str = "bfloat16"
    device: str = "cuda"
    transformer: Transformer | None = None
    order: tuple[int, ...] = ()
    tp: int = 1
    _divided: dict[tuple[bool, int, int], Buckets] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        """The model's name, and the size of the batch if activations are known."""
        shape = self.activated
        return self.called if shape is None else f"{self.called}, batch {shape.batch:,} x {shape.seq:,} on a rank"

    @property
    def activated(self) -> Transformer | None:
        """The transformer, if its activations are known."""
        return self.transformer if self.transformer is not None and self.transformer.has_activations else None

    def in_batches_of(self, batch: int) -> ModelSpec:
        """Returns the same model with fewer sequences at a time."""
        assert self.transformer is not None
        made = replace(self, transformer=replace(self.transformer, batch=batch))
        made._divided.update(self._divided)
        return made

    @cached_property
    def numel(self) -> int:
        return self.bare_numel or sum(member.numel for member in self.members)

    @cached_property
    def main_dtype(self) -> str:
        """The dtype of most trainable elements, or of most elements."""
        if not self.members:
            return self.dtype
        totals: dict[str, int] = {}
        for member in [member for member in self.members if member.trainable] or self.members:
            totals[member.dtype] = totals.get(member.dtype, 0) + member.numel
        return max(totals, key=lambda dtype: totals[dtype])

    def buckets(self, stage: int, world: int, bucket_bytes: int) -> Buckets:
        """Returns the buckets that `zk.shard` would make at this stage."""
        key = shards_parameters(stage), world, bucket_bytes
        if key not in self._divided:
            if self.members:
                sizes = tuple(map(BucketSize.of, self._partition(*key)))
            else:
                sizes = (BucketSize.bare(self.bare_numel, self.dtype, world, bucket_bytes),)
            self._divided[key] = Buckets(sizes, key[0] and bool(self.units))
        return self._divided[key]

    def pieces(self, stage: int, world: int, bucket_bytes: int, *, needed_first: bool = False) -> list[tuple[int, str]]:
        """Returns the elements that rank 0 updates of each trained parameter, with its dtype, in the optimizer's order.

        `needed_first`: in the order in which forwards need them; those of a bare number are its buckets.

        >>> from zerokern.planner.recipe import Recipe
        >>> model_spec(1000, Recipe(), None).pieces(2, 4, 1 << 20)
        [(256, 'bfloat16')]
        """
        if not self.members:
            (bucket,) = self.buckets(stage, world, bucket_bytes).sizes
            numel, parts = bucket.updated(shards_state(stage))[0], bucket.count if needed_first else 1
            return [(numel * (n + 1) // parts - numel * n // parts, bucket.dtype) for n in range(parts)]
        order = [place for place in self.order or range(len(self.members)) if self.members[place].trainable]
        if not shards_state(stage):
            return [(self.members[place].numel, self.members[place].dtype) for place in order]
        own = {
            piece.param: piece.numel
            for bucket in self._partition(shards_parameters(stage), world, bucket_bytes)
            for piece in bucket.pieces(0)
        }
        trained = set(order)
        order = (
            [place for place in own if place in trained] if needed_first else [place for place in order if place in own]
        )
        return [(own[place], self.members[place].dtype) for place in order]

    def _partition(self, in_units: bool, world: int, bucket_bytes: int) -> list[Bucket]:
        from zerokern.zero.partition import Member, partition

        members = self.members
        if not in_units:
            members = tuple(Member(member.numel, member.dtype, 0, member.trainable) for member in members)
        most = bucket_bytes // max(itemsize(member.dtype) for member in members)
        return partition(members, world, max(1, most))


def model_spec(what: Any, recipe: Recipe, units: Any, tp: int = 1, pp: int = 1) -> ModelSpec:
    """Reads what users pass: a number or text, a `Transformer`, or a module; of the first two, one of tp x pp parts.

    >>> model_spec("1T", Recipe(), None, tp=4, pp=8).title
    '1T parameters in tp 4 x pp 8 parts of 31.2B'
    """
    if isinstance(what, Transformer):
        return _of_transformer(what, recipe.param_dtype or "bfloat16", tp, pp)
    if isinstance(what, (int, str)) and not isinstance(what, bool):
        numel = parse_numel(what)
        part = -(-numel // (tp * pp))
        title = f"{count(numel)} parameters{_of_part(part, tp, pp)}"
        return ModelSpec(title, (), (), part, recipe.param_dtype or "bfloat16", tp=tp)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(what, torch.nn.Module):
        found = _of_module(what, recipe, units)
        if tp not in (1, found.tp):
            here = f"a model whose DTensors are on {found.tp} ranks" if found.tp > 1 else "a model of plain tensors"
            do = "Divide it first by parallelize_module; ranks of init_process_group('fake') will do"
            raise ValueError(got("tp", tp, f"{found.tp}, for {here}", do))
        return found
    allowed = "an nn.Module, a number of parameters (7_500_000_000 or '7.5B'), or a zerokern.planner.Transformer"
    raise TypeError(got("model", what, allowed))


def _of_part(numel: int, tp: int, pp: int) -> str:
    which = " x ".join(f"{name} {size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1)
    return f" in {which} parts of {count(numel)}" if which else ""


def _of_transformer(shape: Transformer, dtype: str, tp: int, pp: int) -> ModelSpec:
    from zerokern.zero.partition import Member

    if pp > shape.layers:
        raise ValueError(got("pp", pp, f"at most a stage for each of layers={shape.layers}"))
    here = -(-shape.layers // pp)
    tensors = [-(-numel // tp) for numel in shape.tensors]
    # outer tensors are counted on every stage of a pipeline: the first and the last have most
    outer = [Member(-(-numel // tp), dtype, 0) for numel in shape.outer_tensors]
    members = (*outer, *(Member(numel, dtype, 1 + layer) for layer in range(here) for numel in tensors))
    names = ("", *(f"layers.{layer}" for layer in range(here)))
    title = f"{shape.title}: {count(shape.numel)} parameters"
    title += _of_part(sum(member.numel for member in members), tp, pp)
    of_stage = replace(shape, layers=here, ci=min(shape.ci, here), itemsize=itemsize(dtype))
    return ModelSpec(title, members, names, dtype=dtype, transformer=of_stage, tp=tp)


def _of_module(module: Any, recipe: Recipe, units: Any) -> ModelSpec:
    import torch

    from zerokern.activations.tiles import units_with_tiles
    from zerokern.parallel.tensor_parallel import mesh_of
    from zerokern.zero.units import members, units_of

    found, pieces = units_with_tiles(units_of(module, units))
    param_dtype = None if recipe.param_dtype is None else getattr(torch, recipe.param_dtype)
    made = tuple(members(found, 3, param_dtype))
    if not made:
        name = type(module).__name__
        raise ValueError(f"{name} has no parameters, so that there is nothing to plan; pass the model that is trained")
    kinds = {param.device.type for param in module.parameters()} - {"meta"}
    numel = sum(member.numel for member in made)
    title = f"{type(module).__name__}, {count(numel)} parameters in {len(made):,} tensors"
    names = tuple(unit.name for unit in found)
    params = [pair for unit in found for pair in unit.params]
    places = {id(param): place for place, (_, param) in enumerate(params)}
    stepped = (piece for param in module.parameters() for piece in pieces.get(id(param), [param]))
    order = tuple(places[id(param)] for param in stepped)
    device = "cpu" if kinds == {"cpu"} else "cuda"
    mesh = mesh_of(params)
    return ModelSpec(title, made, names, device=device, order=order, tp=1 if mesh is None else mesh.size())
