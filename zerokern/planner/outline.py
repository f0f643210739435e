"""What is planned: a number of parameters, the shape of a transformer, or a module. Each as buckets cut into shards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got
from zerokern.core.units import BLOCK
from zerokern.planner.activations import check_attention
from zerokern.planner.amounts import count, parse_numel
from zerokern.planner.recipe import Recipe, itemsize
from zerokern.schedule.passes import ROOT
from zerokern.zero.partition import shards_parameters, shards_state

if TYPE_CHECKING:
    from zerokern.zero.partition import Bucket, Member

__all__ = ["Buckets", "Load", "Outline", "Transformer", "subject_of"]


@dataclass(frozen=True)
class Outline:
    """Parameters of a model, in units that are gathered together. `units` empty: only a number is known."""

    called: str
    members: tuple[Member, ...]
    units: tuple[str, ...]
    bare_numel: int = 0
    dtype: str = "bfloat16"
    device: str = "cuda"
    transformer: Transformer | None = None
    order: tuple[int, ...] = ()
    """members as an optimizer has them; empty: in their own order"""
    tp: int = 1
    """ranks that have other parts of each parameter, which a module's DTensors know"""
    _divided: dict[tuple[bool, int, int], Buckets] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        """What it is called, and with activations of how many tokens."""
        shape = self.transformer
        if shape is None or not shape.has_activations:
            return self.called
        return f"{self.called}, batch {shape.batch:,} x {shape.seq:,} on a rank"

    def in_batches_of(self, batch: int) -> Outline:
        """The same with fewer sequences at a time."""
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
        some = [member for member in self.members if member.trainable] or list(self.members)
        totals: dict[str, int] = {}
        for member in some:
            totals[member.dtype] = totals.get(member.dtype, 0) + member.numel
        return max(totals, key=lambda dtype: totals[dtype])

    def buckets(self, stage: int, world: int, bucket_bytes: int) -> Buckets:
        """As `zk.shard` would make them at this stage."""
        key = shards_parameters(stage), world, bucket_bytes
        if key not in self._divided:
            self._divided[key] = Buckets(tuple(self._loads(*key)), key[0] and bool(self.units))
        return self._divided[key]

    def pieces(self, stage: int, world: int, bucket_bytes: int) -> list[tuple[int, str]]:
        """Elements and dtype of what rank 0 updates of each trained parameter, as an optimizer has them in order.

        >>> from zerokern.planner.recipe import Recipe
        >>> subject_of(1000, Recipe(), None).pieces(2, 4, 1 << 20)
        [(256, 'bfloat16')]
        """
        if not self.members:
            (load,) = self.buckets(stage, world, bucket_bytes).loads
            return [(load.own_numel if shards_state(stage) else load.numel, load.dtype)]
        order = [place for place in self.order or range(len(self.members)) if self.members[place].trainable]
        if not shards_state(stage):
            return [(self.members[place].numel, self.members[place].dtype) for place in order]
        own = {
            piece.param: piece.numel
            for bucket in self._partition(shards_parameters(stage), world, bucket_bytes)
            for piece in bucket.pieces(0)
        }
        return [(own[place], self.members[place].dtype) for place in order if place in own]

    def _loads(self, in_units: bool, world: int, bucket_bytes: int) -> Iterator[Load]:
        if not self.members:
            yield Load.bare(self.bare_numel, self.dtype, world, bucket_bytes)
            return
        yield from map(Load.of, self._partition(in_units, world, bucket_bytes))

    def _partition(self, in_units: bool, world: int, bucket_bytes: int) -> list[Bucket]:
        from zerokern.zero.partition import partition

        members = self.members if in_units else _in_one_unit(self.members)
        most = bucket_bytes // max(itemsize(member.dtype) for member in members)
        return partition(members, world, max(1, most))


def subject_of(what: Any, recipe: Recipe, units: Any, tp: int = 1, pp: int = 1) -> Outline:
    """From what users pass: a number or text, a `Transformer`, or a module. Of the first two a part: one of tp x pp.

    >>> subject_of("1T", Recipe(), None, tp=4, pp=8).title
    '1T parameters in tp 4 x pp 8 parts of 31.2B'
    """
    if isinstance(what, Transformer):
        return _of_transformer(what, recipe.param_dtype or "bfloat16", tp, pp)
    if isinstance(what, (int, str)) and not isinstance(what, bool):
        numel = parse_numel(what)
        part = -(-numel // (tp * pp))
        title = f"{count(numel)} parameters{_of_part(part, tp, pp)}"
        return Outline(title, (), (), part, recipe.param_dtype or "bfloat16", tp=tp)
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


def _of_transformer(shape: Transformer, dtype: str, tp: int, pp: int) -> Outline:
    from zerokern.zero.partition import Member

    if pp > shape.layers:
        raise ValueError(got("pp", pp, f"at most a stage for each of layers={shape.layers}"))
    here = -(-shape.layers // pp)
    tensors = [-(-numel // tp) for numel in shape.tensors]
    outside = [Member(-(-numel // tp), dtype, 0) for numel in shape.outside]  # on every stage of a pipeline: the most
    members = (*outside, *(Member(numel, dtype, 1 + layer) for layer in range(here) for numel in tensors))
    names = ("", *(f"layers.{layer}" for layer in range(here)))
    title = f"{shape.title}: {count(shape.numel)} parameters"
    title += _of_part(sum(member.numel for member in members), tp, pp)
    of_stage = replace(shape, layers=here, ci=min(shape.ci, here), itemsize=itemsize(dtype))
    return Outline(title, members, names, dtype=dtype, transformer=of_stage, tp=tp)


def _of_module(module: Any, recipe: Recipe, units: Any) -> Outline:
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
    places = {id(param): place for place, (_, param) in enumerate(pair for unit in found for pair in unit.params)}
    stepped = (piece for param in module.parameters() for piece in pieces.get(id(param), [param]))
    order = tuple(places[id(param)] for param in stepped)
    device = "cpu" if kinds == {"cpu"} else "cuda"
    divides = mesh_of([pair for unit in found for pair in unit.params])
    return Outline(title, made, names, device=device, order=order, tp=1 if divides is None else divides.size())


def _in_one_unit(members: Sequence[Member]) -> list[Member]:
    from zerokern.zero.partition import Member

    return [Member(member.numel, member.dtype, 0, member.trainable) for member in members]


_STATES = 20  # bytes per parameter: fp16 parameter, fp32 gradient and its fp16 source, fp32 master and two averages
_WORKING = 16  # bytes by hidden², of the largest operator (hidden to 4 hidden): fp16 parameters and gradients


@dataclass(frozen=True)
class Transformer:
    """`layers` blocks of 12 hidden² parameters; with `heads`, `batch` (per rank) and `seq` also its activations.

    `ci` is how many blocks lie between two activation checkpoints, `itemsize` the bytes of one of their elements.
    attention: "sdpa", which stores no scores, as flash attention does not; or "eager", which stores all of them.

    >>> gpt = Transformer(128, 25 * 1024, heads=256, batch=32, seq=1024)
    >>> f"{gpt.numel / 1e12:.2f} T, states {gpt.states / 2**40:.2f} TiB, checkpoints {gpt.checkpoints / 2**40:.2f} TiB"
    '1.01 T, states 18.31 TiB, checkpoints 0.20 TiB'
    """

    layers: int
    hidden: int
    heads: int | None = None
    batch: int | None = None
    seq: int | None = None
    ci: int = 1
    attention: str = "sdpa"
    itemsize: int = 2

    def __post_init__(self) -> None:
        check_attention(self.attention)
        for name in ("layers", "hidden", "heads", "batch", "seq", "ci", "itemsize"):
            value = getattr(self, name)
            if value is None and name in ("heads", "batch", "seq"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(got(name, value, "a whole number from 1 on"))
        given = [name for name in ("heads", "batch", "seq") if getattr(self, name) is not None]
        if given and len(given) < 3:
            missing = ", ".join(name for name in ("heads", "batch", "seq") if name not in given)
            raise ValueError(
                f"activations follow from heads, batch and seq together; {missing} is missing: give it too"
            )
        if self.ci > self.layers:
            raise ValueError(
                got("ci", self.ci, f"a number of layers between checkpoints, at most layers={self.layers}")
            )

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of the parameters of one layer: query, key and value; output; up; down."""
        square = self.hidden * self.hidden
        return 3 * square, square, 4 * square, 4 * square

    @property
    def outside(self) -> tuple[int, ...]:
        """Elements of the parameters of no layer; a bare shape has none."""
        return ()

    @property
    def title(self) -> str:
        return f"Transformer of {self.layers} layers, hidden {self.hidden:,}, without embeddings"

    @property
    def numel(self) -> int:
        return self.layers * sum(self.tensors) + sum(self.outside)

    @property
    def states(self) -> int:
        """Bytes of model states as the paper counts them, of all ranks together."""
        return _STATES * self.numel

    @property
    def working_states(self) -> int:
        """Bytes of the parameters and gradients of the largest operator."""
        return _WORKING * self.hidden * self.hidden

    @property
    def has_activations(self) -> bool:
        return self.batch is not None

    @property
    def activations(self) -> int:
        """Bytes of all activations, if none is recomputed."""
        return sum(self.peak())

    @property
    def checkpoints(self) -> int:
        """Bytes of activation checkpoints; where `ci` does not divide the layers, as the paper has it, a fraction."""
        return self.checkpoint * self.layers // self.ci

    @property
    def checkpoint(self) -> int:
        """Bytes of one of them."""
        return self.itemsize * self.tokens * self.hidden

    @property
    def working_activations(self) -> int:
        """Bytes of the activations between two checkpoints, while they are recomputed."""
        return sum(self.peak(self.batch or 0))

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return (self.batch or 0) * (self.seq or 0)

    @property
    def counts_logits(self) -> bool:
        """Whether the size of the vocabulary is known."""
        return False

    def peak(self, rows: int | None = None) -> tuple[int, int]:
        """Bytes of activations, and of logits and loss, when there are most of both together.

        rows: beside `checkpoints`, where units are recomputed for so many sequences at a time. None: nothing is.
        """
        if rows is None:
            return self._layer_activations * self.layers, 0
        return self._layer_activations * self.ci // 2 * rows // (self.batch or 1), 0

    @property
    def _layer_activations(self) -> int:
        """As the ZeRO-Infinity paper counts them."""
        scores = 2 * self.itemsize * (self.seq or 0) if self.attention == "eager" else 4
        return self.tokens * (16 * self.itemsize * self.hidden + scores * (self.heads or 0))


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
    in_units: bool = False

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
    def root(self) -> Buckets:
        """Of a model in units: what belongs to none of them."""
        return Buckets(tuple(load for load in self.loads if load.unit == ROOT and self.in_units))

    @cached_property
    def others(self) -> Buckets:
        """What comes and goes unit by unit: all of it where units are not known."""
        return Buckets(tuple(load for load in self.loads if load.unit != ROOT or not self.in_units))

    @cached_property
    def by_unit(self) -> list[list[Load]]:
        """Buckets of one unit after those of another."""
        return [list(loads) for _, loads in groupby(self.loads, key=lambda load: load.unit)]

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
