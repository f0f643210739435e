"""Describes the model that is planned: its parameters by unit, and the buckets that `zk.shard` would make of them."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from zerokern.core.errors import got
from zerokern.core.units import BLOCK, itemsize
from zerokern.planner.amounts import count, parse_numel
from zerokern.planner.matrices import CutShape, MatrixShape, loads, open_in_backward
from zerokern.planner.recipe import Recipe
from zerokern.planner.transformer import Transformer
from zerokern.schedule.passes import ROOT
from zerokern.zero.partition import Bucket, Member, partition, shards_parameters, shards_state

if TYPE_CHECKING:
    import torch

__all__ = ["BucketSize", "Buckets", "ModelSpec", "OwnedPart", "keeps_whole", "model_spec", "together"]

_SUMMED = (
    "count", "numel", "padded_numel", "shard_numel", "own_numel", "own_blocks", "matrix_numel", "matrix_blocks", "work",
)  # fmt: skip
_NO_SHAPES = "Muon updates whole matrices, and a number alone does not say which there are"


@dataclass(frozen=True)
class BucketSize:
    """Counts the elements of a bucket, or of `count` buckets together: of parameters, with padding, and those that one
    rank updates, which are its own, or all where state is not sharded.

    `own_blocks`: of its int8 state. `largest_numel`: padded elements of the largest of the buckets. `matrix_numel`,
    `matrix_blocks`: what of its own is in matrices that are updated whole. `work`: of these on all ranks, as the
    partition counts it.
    """

    unit: int
    dtype: str
    trainable: bool
    numel: int
    padded_numel: int
    shard_numel: int
    own_numel: int
    own_blocks: int
    largest_numel: int
    count: int = 1
    matrix_numel: int = 0
    matrix_blocks: int = 0
    work: int = 0

    @classmethod
    def of(cls, bucket: Bucket, rank: int | None, works: Sequence[int] = ()) -> BucketSize:
        """Returns the size of a bucket of the partition, for a rank; None: one of those that update all. `works`: of
        each parameter, 0 if it is none that is updated whole; empty: all are so."""
        own = bucket.places if rank is None else bucket.pieces(rank)
        matrices = [piece for piece in own if works and works[piece.param]]
        return cls(
            bucket.unit,
            bucket.dtype,
            bucket.trainable,
            sum(place.numel for place in bucket.places),
            bucket.padded_numel,
            bucket.shard_numel,
            sum(piece.numel for piece in own),
            sum(-(-piece.numel // BLOCK) for piece in own),
            bucket.padded_numel,
            1,
            sum(piece.numel for piece in matrices),
            sum(-(-piece.numel // BLOCK) for piece in matrices),
            sum(works[place.param] for place in bucket.places if works),
        )

    @classmethod
    def bare(cls, numel: int, dtype: str, world: int, bucket_bytes: int, *, is_sharded: bool = True) -> BucketSize:
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
        own = (min(shard, numel), own_blocks) if is_sharded else (numel, blocks)
        return cls(0, dtype, True, numel, shard * world, shard, *own, largest, -(-shard * world // largest))

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.padded_numel * self.itemsize

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.itemsize

    def each(self, most: int = sys.maxsize) -> list[BucketSize]:
        """Returns the buckets that it counts together, one by one; or as `most` parts, if they are more.

        >>> [one.numel for one in BucketSize.bare(1000, "float32", 1, 2000).each()]
        [500, 500]
        """
        count = min(self.count, most)
        if count == 1:
            return [self]
        made = []
        for number in range(count):
            sums: dict[str, Any] = {name: _part(getattr(self, name), number, count) for name in _SUMMED}
            made.append(replace(self, **sums))
        return made

    def by_rule(self) -> Iterator[tuple[bool, int, int]]:
        """Yields what the rank updates in matrices that are updated whole, and of the rest: (whether it is, elements,
        int8 blocks)."""
        yield True, self.matrix_numel, self.matrix_blocks
        yield False, self.own_numel - self.matrix_numel, self.own_blocks - self.matrix_blocks


@dataclass(frozen=True)
class Buckets:
    """The buckets that `zk.shard` would make of a model at a stage, in the order of the units, and their sizes."""

    model: ModelSpec = field(compare=False, repr=False)
    stage: int
    world: int
    cut: Sequence[Bucket]
    """none of a bare number"""
    sizes: tuple[BucketSize, ...]
    last_unit: int = -1
    """where these are some of a model's, the last unit of that; negative: theirs"""
    rank: int = 0
    """whose own elements are counted: that which has most"""

    @property
    def in_units(self) -> bool:
        """Whether they are of one unit each."""
        return shards_parameters(self.stage) and bool(self.model.units)

    @property
    def whole_padding(self) -> int:
        """Elements of padding in the buckets of matrices that are updated whole."""
        return sum(bucket.padding for bucket in self.cut if bucket.whole)

    def most_work(self, weigh: Callable[[MatrixShape], int]) -> int:
        """Returns the work of whole matrices on the rank that has most of it, where none is cut."""
        works = [0 if shape is None else weigh(shape) for shape in self.model.matrices]
        return max(loads(works, self.cut, self.world)) if works else 0

    def enclose(self, bucket: BucketSize) -> bool:
        """Returns whether a bucket belongs to no unit, in a model that has units: all of them need it."""
        return self.in_units and bucket.unit == ROOT

    def some(self, sizes: Sequence[BucketSize]) -> Buckets:
        """Returns those of the same model that are among these."""
        last_unit = self.beside_root[-1][0].unit if self.beside_root else 0
        return replace(self, sizes=tuple(sizes), last_unit=last_unit)

    @cached_property
    def kinds(self) -> list[BucketSize]:
        """One sum per dtype, trained and frozen apart: bytes are linear in all but the largest."""
        groups: dict[tuple[str, bool], list[BucketSize]] = {}
        for bucket in self.sizes:
            groups.setdefault((bucket.dtype, bucket.trainable), []).append(bucket)
        return [together(sizes) for sizes in groups.values()]

    @cached_property
    def trained(self) -> list[BucketSize]:
        """The kinds that have gradients."""
        return [kind for kind in self.kinds if kind.trainable]

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of a bucket's gradients as autograd allocates them, on top of the rest while backward runs."""
        return max((kind.largest_numel * kind.itemsize for kind in self.trained), default=0)

    @cached_property
    def root(self) -> list[BucketSize]:
        """The buckets of no unit, in a model that has units."""
        return [bucket for bucket in self.sizes if self.enclose(bucket)]

    @cached_property
    def by_unit(self) -> list[list[BucketSize]]:
        """The buckets of each unit."""
        return [list(sizes) for _, sizes in groupby(self.sizes, key=lambda bucket: bucket.unit)]

    @cached_property
    def beside_root(self) -> list[list[BucketSize]]:
        """The buckets of each unit that is gathered and resharded by itself; all buckets if units are unknown."""
        return [sizes for sizes in self.by_unit if not self.enclose(sizes[0])]

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
        units = Counter[int]()
        for bucket in self.sizes:
            units[bucket.unit] += bucket.nbytes
        root, others = units.pop(0, 0), [nbytes for _, nbytes in sorted(units.items())]
        return root + max((sum(others[i : i + 2]) for i in range(len(others))), default=0)

    def pieces(self, *, needed_first: bool = False) -> list[OwnedPart]:
        """Returns what the rank updates of each trained parameter, in the optimizer's order.

        `needed_first`: in the order in which forwards need them; those of a bare number are its buckets.

        >>> from zerokern.planner.recipe import Recipe
        >>> model_spec(1000, Recipe(), None).buckets(2, 4, 1 << 20).pieces()
        [OwnedPart(numel=256, dtype='bfloat16', matrix=None, start=0, turn=0, bucket=None)]
        """
        model, is_sharded = self.model, shards_state(self.stage)
        if not model.members:
            (bucket,) = self.sizes
            parts = bucket.count if needed_first else 1
            ends = [bucket.own_numel * number // parts for number in range(parts + 1)]
            return [OwnedPart(b - a, bucket.dtype, None, a, turn) for turn, (a, b) in enumerate(pairwise(ends))]
        matrices = model.matrices or [None] * len(model.members)
        own = {at: (model.members[at].numel, 0) for at in model.stepped}
        rows = [(at, turn) for turn, at in enumerate(model.stepped)]
        cut_in: dict[int, int] = {}
        if is_sharded or self.world > 1:  # else nobody has cut it into buckets
            number_of = {spot.param: number for number, bucket in enumerate(self.cut) for spot in bucket.places}
            if is_sharded:
                pieces = (piece for bucket in self.cut for piece in bucket.pieces(self.rank))
                own = {piece.param: (piece.numel, piece.start) for piece in pieces}
            if shards_parameters(self.stage) and self.world > 1:
                cut_in = {at: number for at, number in number_of.items() if matrices[at] is not None}
            rows.sort(key=lambda row: number_of[row[0]] if needed_first else row[1])
        return [
            OwnedPart(own[at][0], model.members[at].dtype, matrices[at], own[at][1], turn, cut_in.get(at))
            for at, turn in rows
            if at in own
        ]

    @cached_property
    def cut_matrices(self) -> list[CutShape]:
        """All matrices of which ranks have parts at stage 3, whichever ranks these are."""
        model, found = self.model, []
        names = model.params or [f"{place:09}" for place in range(len(model.members))]
        turns = {place: turn for turn, place in enumerate(model.stepped)}
        for number, bucket in enumerate(self.cut):
            for spot in bucket.places:
                one, called = model.matrices[spot.param] if model.matrices else None, names[spot.param]
                if one is None or spot.param not in turns:
                    continue
                for nth in range(one.split):
                    name = called if one.split == 1 else f"{called}[{nth}]"
                    at = spot.offset + nth * one.each.numel, bucket.shard_numel
                    found.append(CutShape(one.each, name, bucket.dtype, turns[spot.param], number, *at))
        return found

    def in_backward_nbytes(self, recipe: Recipe, device: str) -> int:
        """Returns the bytes of the buffers that gradients are reduced in at stage 2, with matrices that are whole."""
        buckets = [one for one in self.cut if one.trainable]
        sizes = [recipe.wire_itemsize(one.dtype) for one in buckets]
        together = [one.arrives_at_once(size, device) for one, size in zip(buckets, sizes, strict=True)]
        nbytes = [one.padded_numel * size for one, size in zip(buckets, sizes, strict=True)]
        return open_in_backward(buckets, nbytes, together, hosts=device == "cpu")


def _part(total: int, number: int, count: int) -> int:
    return total * (number + 1) // count - total * number // count


def together(sizes: Sequence[BucketSize]) -> BucketSize:
    """Returns what these buckets are together, which are of one dtype."""
    first = sizes[0]
    sums = {name: sum(getattr(bucket, name) for bucket in sizes) for name in _SUMMED}
    largest = max(bucket.largest_numel for bucket in sizes)
    return BucketSize(first.unit, first.dtype, first.trainable, largest_numel=largest, **sums)


class OwnedPart(NamedTuple):
    """What one rank updates of a parameter, `numel` elements from `start` on; `matrix`: if that is updated whole, its
    shape. `turn`: its place among what optimizers update. `bucket`: its number, where ranks have parts of matrices."""

    numel: int
    dtype: str
    matrix: MatrixShape | None = None
    start: int = 0
    turn: int = 0
    bucket: int | None = None

    def by_matrix(self) -> list[int]:
        """Returns the elements of it that are in each of the parameter's matrices; all of it where that is none.

        >>> OwnedPart(6, "float32", MatrixShape(2, 2, 3), start=3).by_matrix()
        [1, 4, 1]
        """
        if self.matrix is None:
            return [self.numel]
        each, end = self.matrix.each.numel, self.start + self.numel
        ends = [min(max((number + 1) * each, self.start), end) for number in range(self.matrix.split)]
        return [b - a for a, b in pairwise([self.start, *ends])]


@dataclass(frozen=True)
class ModelSpec:
    """Lists the parameters of a model by unit. `units` is empty if only their number is known.

    `matrices`: of each member its shape, if it is updated whole; empty if none is. `order`: the optimizer's order of
    the members; empty for their own. `tp`: ranks that hold other parts of each parameter, as a module's DTensors say.
    `params`: the members' names, of a module.
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
    matrices: tuple[MatrixShape | None, ...] = ()
    params: tuple[str, ...] = ()
    _divided: dict[tuple[bool, bool, int, int], Buckets] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        totals = Counter[str]()
        for member in [member for member in self.members if member.trainable] or self.members:
            totals[member.dtype] += member.numel
        return max(totals, key=totals.__getitem__)

    @cached_property
    def stepped(self) -> list[int]:
        """The trained members, in the optimizer's order."""
        return [place for place in self.order or range(len(self.members)) if self.members[place].trainable]

    @cached_property
    def whole(self) -> list[MatrixShape]:
        """The shapes of trained parameters that are updated whole."""
        pairs = zip(self.matrices, self.members, strict=True) if self.matrices else ()
        return [matrix for matrix, member in pairs if matrix is not None and member.trainable]

    def buckets(self, stage: int, world: int, bucket_bytes: int) -> Buckets:
        """Returns the buckets that `zk.shard` would make at this stage."""
        key = shards_parameters(stage), keeps_whole(stage), world, bucket_bytes
        if key not in self._divided:
            self._divided[key] = self._divide(stage, *key)
        return self._divided[key]

    def _divide(self, stage: int, in_units: bool, whole: bool, world: int, bucket_bytes: int) -> Buckets:
        is_sharded = shards_state(stage)
        if not self.members:
            size = BucketSize.bare(self.bare_numel, self.dtype, world, bucket_bytes, is_sharded=is_sharded)
            return Buckets(self, stage, world, (), (size,))
        cut = self._partition(in_units, whole, world, bucket_bytes)
        works, rank = list[int](), 0
        if self.matrices:
            works = [member.work for member in self.members]
            if whole:
                numels = loads([member.numel if member.work else 0 for member in self.members], cut, world)
                rank = numels.index(max(numels))
        sizes = tuple(BucketSize.of(bucket, rank if is_sharded else None, works) for bucket in cut)
        return Buckets(self, stage, world, cut, sizes, rank=rank)

    def _partition(self, in_units: bool, whole: bool, world: int, bucket_bytes: int) -> list[Bucket]:
        """Cuts the members into buckets. `whole`: matrices that are updated whole are not cut."""
        members = self.members
        if not in_units or (self.matrices and not whole):
            members = tuple(
                replace(one, unit=one.unit if in_units else 0, work=one.work if whole else 0) for one in members
            )
        most = bucket_bytes // max(itemsize(member.dtype) for member in members)
        return partition(members, world, max(1, most))


def keeps_whole(stage: int) -> bool:
    """Returns whether `zk.shard(whole=)` lays matrices out so that none is cut.

    >>> [keeps_whole(stage) for stage in range(4)]
    [False, True, True, False]
    """
    return shards_state(stage) and not shards_parameters(stage)


def model_spec(what: Any, recipe: Recipe, units: Any, tp: int = 1, pp: int = 1, whole: Any = None) -> ModelSpec:
    """Reads what users pass: a number or text, a `Transformer`, or a module; of the first two, one of tp x pp parts.

    >>> model_spec("1T", Recipe(), None, tp=4, pp=8).title
    '1T parameters in tp 4 x pp 8 parts of 31.2B'
    """
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(what, torch.nn.Module)
    if whole is not None and not is_module:
        raise ValueError(got("whole", whole, "None, unless a module is planned, whose parameters it names"))
    if recipe.is_muon and tp > 1:
        do = "zk.Muon refuses DTensors, of which no rank has whole matrices"
        raise ValueError(got("mesh", f"tp={tp}", "no tp with optimizer='muon'", do))
    if isinstance(what, Transformer):
        return _of_transformer(what, recipe, tp, pp)
    if isinstance(what, (int, str)) and not isinstance(what, bool):
        numel = parse_numel(what)
        if recipe.is_muon:
            allowed = "a module, a published model such as 'llama-3-8b', or a Transformer with optimizer='muon'"
            raise ValueError(got("model", what, allowed, _NO_SHAPES))
        part = -(-numel // (tp * pp))
        title = f"{count(numel)} parameters{_of_part(part, tp, pp)}"
        return ModelSpec(title, (), (), part, recipe.param_dtype or "bfloat16", tp=tp)
    if is_module:
        found = _of_module(what, recipe, units, whole)
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


def _of_transformer(shape: Transformer, recipe: Recipe, tp: int, pp: int) -> ModelSpec:
    dtype = recipe.param_dtype or "bfloat16"
    if pp > shape.layers:
        raise ValueError(got("pp", pp, f"at most a stage for each of layers={shape.layers}"))
    here = -(-shape.layers // pp)
    # as zk.muon_groups has it: what has two dimensions in a layer, and nothing outside of them
    of_layer = [MatrixShape.of(one) if recipe.is_muon and len(one) == 2 else None for one in shape.shapes]
    tensors = [
        (-(-math.prod(one) // tp), 0 if it is None else it.work) for one, it in zip(shape.shapes, of_layer, strict=True)
    ]
    # outer tensors are counted on every stage of a pipeline: the first and the last have most
    outer = [Member(-(-math.prod(one) // tp), dtype, 0) for one in shape.outer_shapes]
    layers = (Member(numel, dtype, 1 + layer, work=work) for layer in range(here) for numel, work in tensors)
    members = (*outer, *layers)
    matrices = (*[None] * len(outer), *of_layer * here) if recipe.is_muon else ()
    names = ("", *(f"layers.{layer}" for layer in range(here)))
    title = f"{shape.title}: {count(shape.numel)} parameters"
    title += _of_part(sum(member.numel for member in members), tp, pp)
    of_stage = replace(shape, layers=here, ci=min(shape.ci, here), itemsize=itemsize(dtype))
    return ModelSpec(title, members, names, dtype=dtype, transformer=of_stage, tp=tp, matrices=matrices)


def _of_module(module: Any, recipe: Recipe, units: Any, whole: Any) -> ModelSpec:
    import torch

    from zerokern.activations.tiles import units_with_tiles
    from zerokern.parallel.tensor_parallel import mesh_of
    from zerokern.zero.units import members, units_of

    found, pieces = units_with_tiles(units_of(module, units))
    param_dtype = None if recipe.param_dtype is None else getattr(torch, recipe.param_dtype)
    shapes = _matrices_of(module, recipe, whole, found)
    made = tuple(members(found, 3, param_dtype, whole={key: one.work for key, one in shapes.items()}))
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
    if recipe.is_muon:  # the order in which whole= lists them, then the rest
        turns = {places[key]: turn for turn, key in enumerate(shapes)}
        order = tuple(sorted(order, key=lambda place: turns.get(place, len(turns))))
    device = "cpu" if kinds == {"cpu"} else "cuda"
    mesh = mesh_of(params)
    matrices = tuple(shapes.get(id(param)) for _, param in params) if shapes else ()
    tp = 1 if mesh is None else mesh.size()
    called = tuple(name for name, _ in params)
    return ModelSpec(title, made, names, device=device, order=order, tp=tp, matrices=matrices, params=called)


def _matrices_of(module: torch.nn.Module, recipe: Recipe, whole: Any, units: Sequence[Any]) -> dict[int, MatrixShape]:
    """Returns the shapes of what is updated whole, by the parameters' ids: what `whole` names, or with Muon what
    `zk.muon_groups` proposes."""
    from zerokern.optim.matrices import check_matrix, matrices_of
    from zerokern.optim.muon import muon_groups
    from zerokern.zero.units import uncut_of

    if whole is None:
        whole = muon_groups(module)[0] if recipe.is_muon else ()
    found = {}
    names = {id(param): name for unit in units for name, param in unit.params}
    for param, split in uncut_of(whole, units):
        if recipe.is_muon:
            name, in_blocks = names[id(param)], recipe.state_format == "int8"
            check_matrix(name, param.shape, split)
            matrices_of(name, param.shape, param.numel(), split, in_blocks=in_blocks)  # refuses what cuts a block
        found[id(param)] = MatrixShape.of(param.shape, split)
    if recipe.is_muon and not found:
        name = type(module).__name__
        do = "whole= names matrices; zk.muon_groups(model) tells why it proposes none"
        raise ValueError(got("model", name, "one with matrices in repeated blocks with optimizer='muon'", do))
    return found
