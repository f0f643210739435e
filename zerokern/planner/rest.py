"""What lies and moves where parameters rest in host memory or on disk, gradients wait, and inputs are kept.

Bytes of one rank. A unit is fetched for forward and again for backward, but the one where forward turns, and what
belongs to no unit, which stay in between; it is updated where it rests. The bytes of a step are those of
`zerokern.schedule.program_of`, which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerokern.core.units import BUFFERS
from zerokern.planner.outline import Buckets, Load, Outline
from zerokern.planner.recipe import Arrangement, Holding, Recipe, itemsize, short
from zerokern.zero.partition import shards_state

__all__ = ["LANES", "Move", "fetched_of", "lanes_to", "moves_of", "states_at_rest", "working_at_rest"]

LANES = {"up": "to the device", "down": "to the host", "read": "from disk", "write": "to disk", "net": "to other ranks"}
"""in the order of a table"""
_BACK = {"up": "down", "read": "write"}


@dataclass(frozen=True)
class Move:
    """Bytes of one role that cross one lane in a step."""

    role: str
    lane: str
    nbytes: int


def lanes_to(tier: str | None, device: str) -> tuple[str, ...]:
    """How what rests in a tier comes to the device.

    >>> lanes_to("nvme", "cuda"), lanes_to("cpu", "cuda"), lanes_to("nvme", "cpu"), lanes_to("device", "cuda")
    (('read', 'up'), ('up',), ('read',), ())
    """
    link = () if device == "cpu" else ("up",)
    return {"nvme": ("read", *link), "cpu": link}.get(tier or "", ())


def states_at_rest(buckets: Buckets, recipe: Recipe, settings: Arrangement) -> Iterator[Holding]:
    """Parameters, gradients and state."""
    host = "device" if settings.device == "cpu" else "cpu"
    for kind in buckets.kinds:
        yield Holding("parameters", short(kind.dtype), recipe.param_tier, kind.shard_numel * kind.itemsize)
    for kind in buckets.trained:
        wire = recipe.wire_dtype(kind.dtype)
        tier = "nvme" if settings.spills else host
        yield Holding("gradients", short(wire), tier, kind.shard_numel * itemsize(wire))
    for kind in buckets.trained:
        for state in recipe.state_of(kind.dtype):
            yield Holding(state.role, state.format, recipe.tier, state.nbytes(kind.own_numel, kind.own_blocks))
    for kind in buckets.trained if recipe.delays and recipe.optimizer != "none" else ():
        yield Holding("shadow", short(kind.dtype), recipe.param_tier, kind.own_numel * kind.itemsize)


def working_at_rest(buckets: Buckets, subject: Outline, recipe: Recipe, settings: Arrangement) -> Iterator[Holding]:
    """A unit that computes, one on its way, on a CPU one that its update has handed over, and gradients that leave."""
    if subject.units:
        hands_over = settings.device == "cpu" and recipe.schedule == "overlap" and recipe.param_tier == "nvme"
        units_nbytes = (sum(load.shard_numel * load.itemsize for load in unit) for unit in buckets.others.by_unit)
        handed = max(units_nbytes, default=0) if hands_over else 0
        yield Holding("gathered", "", "device", buckets.gathered_nbytes + handed)
    wire = {load.dtype: itemsize(recipe.wire_dtype(load.dtype)) for load in buckets.trained}
    largest = max((kind.largest_numel * wire[kind.dtype] for kind in buckets.trained), default=0)
    units = ([load for load in unit if load.trainable] for unit in buckets.by_unit)
    of_unit = max((sum(load.padded_numel * wire[load.dtype] for load in some) for some in units), default=0)
    if settings.micro > 1 and subject.units:  # slices are added in a unit's own gradients, which leave together
        largest = of_unit
    if settings.spills and settings.device == "cpu":  # of a unit that is updated, a bucket on its way
        yield Holding("buffers", "", "device", of_unit + largest)
    else:
        yield Holding("buffers", "", "device", BUFFERS * largest)
    if settings.device == "cpu" and settings.has_others:
        span = largest // settings.world
        second = (settings.replicate - 1) * -(-span // settings.replicate)
        yield Holding("scratch", "", "device", (settings.world - 1) * span + second)


def fetched_of(buckets: Buckets) -> tuple[int, int, int]:
    """Bytes of a rank's parameters; of those in no unit, which stay until backward is over; and of the last unit."""
    root, units = buckets.root.loads, buckets.others.by_unit if buckets.in_units else []
    some = (buckets.loads, root, units[-1] if units else [])
    return tuple(sum(load.shard_numel * load.itemsize for load in loads) for loads in some)  # type: ignore[return-value]


def moves_of(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> list[Move]:
    """What a rank moves over its link and to and from its disk; what ranks send each other is `traffic_of`."""
    buckets = subject.buckets(stage, settings.world, settings.bucket_bytes)
    found: list[Move] = []
    if recipe.rests:
        found += _parameters(buckets, recipe, settings)
        found += _gradients(buckets, recipe, settings)
    elif recipe.has_twins(settings.device) and settings.device != "cpu":
        found += _crossing(buckets.trained, recipe, stage)
    if recipe.tier == "nvme":
        for kind in buckets.trained:
            own = (kind.own_numel, kind.own_blocks) if shards_state(stage) else (kind.numel, kind.blocks)
            roles = [(state.role, state.nbytes(*own)) for state in recipe.state_of(kind.dtype)]
            found += [Move(role, lane, nbytes) for role, nbytes in roles for lane in ("read", "write")]
    shape = subject.transformer
    if shape is not None and shape.has_activations:
        away = (shape.checkpoints - shape.checkpoint) * settings.accumulate
        for lane in lanes_to(recipe.keep, settings.device):
            found += [Move("checkpoints", _BACK[lane], away), Move("checkpoints", lane, away)]
    return _added(found)


def _parameters(buckets: Buckets, recipe: Recipe, settings: Arrangement) -> Iterator[Move]:
    whole, root, last = fetched_of(buckets)
    for lane in lanes_to(recipe.param_tier, settings.device):
        yield Move("parameters", lane, settings.accumulate * (2 * whole - root - last))
    if recipe.optimizer == "none":
        return
    updated = sum(kind.own_numel * kind.itemsize for kind in buckets.trained)
    if recipe.param_tier == "nvme":
        yield Move("parameters", "write", updated)
        if recipe.schedule == "sync":  # the update comes after both fetches, and so reads for itself
            yield Move("parameters", "read", updated)


def _gradients(buckets: Buckets, recipe: Recipe, settings: Arrangement) -> Iterator[Move]:
    """Each micro-batch sends its own, and what waits on the disk is read to add to it; then by the update."""
    own = settings.accumulate * sum(
        kind.own_numel * itemsize(recipe.wire_dtype(kind.dtype)) for kind in buckets.trained
    )
    if settings.device != "cpu":
        yield Move("gradients", "down", own)
    if settings.spills:
        yield Move("gradients", "write", own)
        yield Move("gradients", "read", own)


def _crossing(trained: Sequence[Load], recipe: Recipe, stage: int) -> Iterator[Move]:
    for kind in trained:
        numel = kind.own_numel if shards_state(stage) else kind.numel
        yield Move("gradients", "down", numel * itemsize(recipe.wire_dtype(kind.dtype)))
        yield Move("parameters", "up", numel * kind.itemsize)


def _added(moves: Iterable[Move]) -> list[Move]:
    """One for each role and lane.

    >>> _added([Move("gradients", "down", 2), Move("gradients", "down", 3), Move("gradients", "up", 0)])
    [Move(role='gradients', lane='down', nbytes=5)]
    """
    sums: dict[tuple[str, str], int] = {}
    for one in moves:
        sums[one.role, one.lane] = sums.get((one.role, one.lane), 0) + one.nbytes
    return [Move(role, lane, nbytes) for (role, lane), nbytes in sums.items() if nbytes]
