"""A step as the list of what it does between ranks, in order; and what that moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerokern.planner.amounts import gigabytes
from zerokern.planner.buckets import Load
from zerokern.planner.recipe import Recipe, itemsize
from zerokern.planner.settings import Settings
from zerokern.zero.stage import shards_parameters, shards_state

__all__ = ["Op", "Traffic", "program_of", "traffic_of"]

ROOT = "root"
_MOVES = ("Gather", "Reduce", "Publish")


class Op(NamedTuple):
    """One thing that happens; `what` is a unit or a bucket. Only Gather, Reduce and Publish move bytes.

    >>> print(Op("Gather", "blocks.0", 2_000_000, 1_000_000))
    Gather    blocks.0                    0.00200 GB
    """

    verb: str
    what: str
    nbytes: int = 0
    numel: int = 0

    def __str__(self) -> str:
        moved = f" {gigabytes(self.nbytes):>10} GB" if self.nbytes else ""
        return f"{self.verb:<9} {self.what:<22}{moved}".rstrip()


@dataclass(frozen=True)
class Traffic:
    """What a step moves between ranks: elements and bytes of whole buckets, the volume that the papers count in Ψ."""

    world: int
    reduced_numel: int
    reduced_nbytes: int
    gathered_numel: int
    gathered_nbytes: int

    @property
    def numel(self) -> int:
        return self.reduced_numel + self.gathered_numel

    @property
    def nbytes(self) -> int:
        return self.reduced_nbytes + self.gathered_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one rank sends: of each bucket all but its own share."""
        return self.nbytes // self.world * (self.world - 1)


def traffic_of(program: Iterable[Op], world: int) -> Traffic:
    """The sum over a program.

    >>> traffic_of([Op("Reduce", "bucket 0", 8, 4), Op("Step", "rank's shards"), Op("Publish", "bucket 0", 8, 4)], 2)
    Traffic(world=2, reduced_numel=4, reduced_nbytes=8, gathered_numel=4, gathered_nbytes=8)
    """
    moved = [op for op in program if op.verb in _MOVES]
    reduced = [op for op in moved if op.verb == "Reduce"]
    gathered = [op for op in moved if op.verb != "Reduce"]
    return Traffic(
        world,
        sum(op.numel for op in reduced),
        sum(op.nbytes for op in reduced),
        sum(op.numel for op in gathered),
        sum(op.nbytes for op in gathered),
    )


def program_of(
    loads: Sequence[Load], names: Sequence[str], recipe: Recipe, stage: int, settings: Settings
) -> tuple[Op, ...]:
    """One optimizer step. Of its micro-batches each is reduced, or, under `zk.no_sync`, the last alone."""
    ops: list[Op] = []
    for number in range(settings.accumulate):
        reduces = not settings.no_sync or number == settings.accumulate - 1
        if shards_parameters(stage) and names:
            ops += _Gathered(loads, names, recipe, settings.world, reduces).ops()
        else:
            ops += _whole(loads, recipe, stage, settings.world, reduces)
    if any(load.trainable for load in loads) and recipe.optimizer != "none":
        ops.append(Op("Step", "own shard" if shards_state(stage) else "everything"))
        if shards_state(stage) and not shards_parameters(stage) and settings.world > 1:
            ops += [
                Op("Publish", f"bucket {number}", load.nbytes, load.padded_numel)
                for number, load in enumerate(loads)
                if load.trainable
            ]
    return tuple(ops)


def _reduce(what: str, load: Load, recipe: Recipe) -> Op:
    nbytes = load.padded_numel * itemsize(recipe.wire_dtype(load.dtype))
    return Op("Reduce", what, nbytes, load.padded_numel)


def _whole(loads: Sequence[Load], recipe: Recipe, stage: int, world: int, reduces: bool) -> Iterator[Op]:
    """Gradients are complete in backward order: the last bucket first. A bare number is one bucket at every stage."""
    yield from _gather_whole(loads, stage, world)
    yield Op("Forward", "model")
    yield from _gather_whole(loads, stage, world)
    yield Op("Backward", "model")
    for number, load in reversed(list(enumerate(loads))):
        if load.trainable and world > 1 and reduces:
            op = _reduce(f"bucket {number}", load, recipe)
            yield op
            if not shards_state(stage):
                yield op._replace(verb="Gather", what=f"bucket {number}, gradients")


def _gather_whole(loads: Sequence[Load], stage: int, world: int) -> list[Op]:
    if not shards_parameters(stage) or world == 1:
        return []
    return [Op("Gather", f"bucket {number}", load.nbytes, load.padded_numel) for number, load in enumerate(loads)]


@dataclass
class _Gathered:
    """Forward and backward at stage 3: a unit is whole while it computes, and the next one is on its way.

    The root's unit and the last one stay whole from forward to backward: they are gathered once.
    """

    loads: Sequence[Load]
    names: Sequence[str]
    recipe: Recipe
    world: int
    reduces: bool

    def __post_init__(self) -> None:
        self.of_unit: dict[int, list[Load]] = {}
        for load in self.loads:
            self.of_unit.setdefault(load.unit, []).append(load)

    def ops(self) -> Iterator[Op]:
        order = [unit for unit in sorted(self.of_unit) if unit]
        yield from self._gather(0)
        for here, following in zip(order, [*order[1:], None], strict=False):
            yield from self._gather(here) if here == order[0] else ()
            yield from self._gather(following)
            yield Op("Forward", self._name(here))
            yield from self._release(here) if following is not None else ()
        yield Op("Forward", ROOT)
        yield Op("Backward", ROOT)
        backward = order[::-1]
        for here, following in zip(backward, [*backward[1:], None], strict=False):
            yield from self._gather(following)
            yield Op("Backward", self._name(here))
            yield from self._reduced(here)
            yield from self._release(here)
        yield from self._reduced(0)
        yield from self._release(0)

    def _name(self, unit: int) -> str:
        return self.names[unit] or ROOT

    def _gather(self, unit: int | None) -> list[Op]:
        loads = [] if unit is None else self.of_unit.get(unit, [])
        if self.world == 1 or not loads:
            return []
        nbytes, numel = sum(load.nbytes for load in loads), sum(load.padded_numel for load in loads)
        return [Op("Gather", self._name(loads[0].unit), nbytes, numel)]

    def _release(self, unit: int) -> list[Op]:
        return [Op("Release", self._name(unit))] if self.world > 1 and unit in self.of_unit else []

    def _reduced(self, unit: int) -> list[Op]:
        trained = [load for load in self.of_unit.get(unit, ()) if load.trainable]
        sends = self.world > 1 and self.reduces
        return [_reduce(self._name(unit), load, self.recipe) for load in trained] if sends else []
