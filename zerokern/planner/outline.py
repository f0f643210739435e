"""What is planned: a number of parameters, the shape of a transformer, or a module. Each as buckets cut into shards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got
from zerokern.planner.amounts import count, parse_numel
from zerokern.planner.buckets import Buckets, Load
from zerokern.planner.recipe import Recipe, itemsize
from zerokern.planner.transformer import Transformer
from zerokern.zero.stage import shards_parameters, shards_state

if TYPE_CHECKING:
    from zerokern.zero.partition import Bucket, Member

__all__ = ["Outline", "subject_of"]


@dataclass(frozen=True)
class Outline:
    """Parameters of a model, in units that are gathered together. `units` empty: only a number is known."""

    title: str
    members: tuple[Member, ...]
    units: tuple[str, ...]
    bare_numel: int = 0
    dtype: str = "bfloat16"
    device: str = "cuda"
    transformer: Transformer | None = None
    order: tuple[int, ...] = ()
    """members as an optimizer has them; empty: in their own order"""
    _divided: dict[tuple[bool, int, int], Buckets] = field(default_factory=dict, init=False, repr=False, compare=False)

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
            self._divided[key] = Buckets(tuple(self._loads(*key)))
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


def subject_of(what: Any, recipe: Recipe, units: Any) -> Outline:
    """From what users pass: a number or text, a `Transformer`, or a module."""
    if isinstance(what, Transformer):
        return _of_transformer(what, recipe.param_dtype or "bfloat16")
    if isinstance(what, (int, str)) and not isinstance(what, bool):
        numel = parse_numel(what)
        return Outline(f"{count(numel)} parameters", (), (), numel, recipe.param_dtype or "bfloat16")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(what, torch.nn.Module):
        return _of_module(what, recipe, units)
    allowed = "an nn.Module, a number of parameters (7_500_000_000 or '7.5B'), or a zerokern.planner.Transformer"
    raise TypeError(got("model", what, allowed))


def _of_transformer(shape: Transformer, dtype: str) -> Outline:
    from zerokern.zero.partition import Member

    members = tuple(Member(numel, dtype, 1 + layer) for layer in range(shape.layers) for numel in shape.tensors)
    names = ("", *(f"layers.{layer}" for layer in range(shape.layers)))
    title = f"Transformer of {shape.layers} layers, hidden {shape.hidden:,}: {count(shape.numel)} parameters"
    if shape.has_activations:
        title += f", batch {shape.batch:,} x {shape.seq:,} on a rank"
    return Outline(title, members, names, dtype=dtype, transformer=shape)


def _of_module(module: Any, recipe: Recipe, units: Any) -> Outline:
    import torch

    from zerokern.zero.units import members, units_of

    found = units_of(module, units)
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
    order = tuple(places[id(param)] for param in module.parameters())
    return Outline(title, made, names, device="cpu" if kinds == {"cpu"} else "cuda", order=order)


def _in_one_unit(members: Sequence[Member]) -> list[Member]:
    from zerokern.zero.partition import Member

    return [Member(member.numel, member.dtype, 0, member.trainable) for member in members]
