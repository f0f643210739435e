"""What one rank holds at one stage, by role and tier, and what it sends in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerokern.core.units import BUFFERS
from zerokern.planner import rest
from zerokern.planner.outline import Buckets, Load, Outline
from zerokern.planner.recipe import Arrangement, Holding, Recipe, StateRole, itemsize, short
from zerokern.zero.partition import shards_gradients, shards_parameters, shards_state

__all__ = ["STATES", "TWINS", "WORKING", "Holding", "Share", "Sums", "pinned_nbytes", "share_of", "summed"]

STATES = ("parameters", "gradients", "master", "remainder", "exp_avg", "exp_avg_sq", "sum", "momentum_buffer")
TWINS = ("host parameters", "host gradients", "shadow")  # of the parameters that are updated in host memory
WORKING = ("gathered", "buffers", "scratch", "ring", *TWINS, "checkpoints", "activations", "logits")


class Sums:
    """What is held, summed."""

    held: tuple[Holding, ...]

    @property
    def roles(self) -> dict[str, int]:
        """Bytes by role, all tiers together."""
        return summed(self.held, lambda one: one.role)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes by tier, all roles together; "device" is where the parameters are."""
        return summed(self.held, lambda one: one.tier)

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state, wherever they lie."""
        return sum(one.nbytes for one in self.held if one.role in STATES)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.tiers.get("device", 0)


@dataclass(frozen=True)
class Share(Sums):
    """One rank's part at one stage.

    `padding`: elements of all buckets that belong to no parameter. `arriving`: bytes of a bucket's gradients as
    autograd makes them, which lie beside the rest while backward runs.
    """

    stage: int
    held: tuple[Holding, ...]
    padding: int = 0
    arriving: int = 0


def summed(held: Iterable[Holding], key: Callable[[Holding], str]) -> dict[str, int]:
    """Bytes by what `key` says of each.

    >>> summed([Holding("exp_avg", "fp32", "device", 4), Holding("exp_avg", "fp32", "cpu", 2)], lambda one: one.role)
    {'exp_avg': 6}
    """
    found: dict[str, int] = {}
    for one in held:
        found[key(one)] = found.get(key(one), 0) + one.nbytes
    return found


def share_of(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> Share:
    """Rank 0's share, which no other rank's exceeds by more than the padding at a cut."""
    buckets = subject.buckets(stage, settings.world, settings.bucket_bytes)
    resting = rest.states_at_rest(buckets, recipe, settings)
    held = [*(resting if recipe.rests else _states(buckets, recipe, stage, settings))]
    held += [*_working(buckets, subject, recipe, stage, settings), *_inputs(subject, recipe, settings)]
    arriving = max((kind.largest_numel * kind.itemsize for kind in buckets.trained), default=0)
    return Share(stage, tuple(one for one in held if one.nbytes), buckets.padding, arriving)


def _states(buckets: Buckets, recipe: Recipe, stage: int, settings: Arrangement) -> Iterator[Holding]:
    for kind in buckets.kinds:
        numel = kind.shard_numel if shards_parameters(stage) else kind.padded_numel
        yield Holding("parameters", short(kind.dtype), "device", numel * kind.itemsize)
    for kind in buckets.trained:
        wire = recipe.wire_dtype(kind.dtype)
        yield Holding("gradients", short(wire), "device", _gradient_numel(kind, stage, settings) * itemsize(wire))
    for kind in buckets.trained:
        own = (kind.own_numel, kind.own_blocks) if shards_state(stage) else (kind.numel, kind.blocks)
        for state in recipe.state_of(kind.dtype):
            yield Holding(state.role, state.format, recipe.tier, state.nbytes(*own))
    if recipe.has_twins(settings.device):
        yield from _twins(buckets, recipe, stage, settings)


def _twins(buckets: Buckets, recipe: Recipe, stage: int, settings: Arrangement) -> Iterator[Holding]:
    """What the update reads and writes on the host; with a delay, room on the device for what is not yet published."""
    for kind in buckets.trained:
        wire = recipe.wire_dtype(kind.dtype)
        numel = kind.own_numel if shards_state(stage) else kind.numel
        yield Holding("host parameters", short(kind.dtype), "cpu", numel * kind.itemsize)
        yield Holding("host gradients", short(wire), "cpu", numel * itemsize(wire))
        if recipe.delays and settings.device != "cpu":
            yield Holding("shadow", short(kind.dtype), "device", numel * kind.itemsize)


def _gradient_numel(kind: Load, stage: int, settings: Arrangement) -> int:
    """Below stage 2 the reduced shard lies in the whole bucket, unless the next micro-batch needs that again."""
    if shards_gradients(stage):
        return kind.shard_numel
    moves_out = settings.world > 1 and settings.accumulate > 1 and not settings.no_sync and shards_state(stage)
    return kind.padded_numel + (kind.shard_numel if moves_out else 0)


def _working(
    buckets: Buckets, subject: Outline, recipe: Recipe, stage: int, settings: Arrangement
) -> Iterator[Holding]:
    """What is there besides the states while a step runs."""
    if recipe.rests:
        yield from rest.working_at_rest(buckets, subject, recipe, settings)
    elif settings.has_others:
        wire = [(kind, itemsize(recipe.wire_dtype(kind.dtype))) for kind in buckets.trained]
        largest = max((kind.largest_numel * size for kind, size in wire), default=0)
        if shards_parameters(stage) and settings.world > 1 and (subject.units or settings.pp > 1):
            stays = settings.pp > 1  # from a step's first micro-batch to its last
            whole = sum(load.nbytes for load in buckets.loads) if stays else buckets.gathered_nbytes
            yield Holding("gathered", "", "device", whole)
        if settings.world == 1:
            pass  # gradients are reduced where they are
        elif shards_gradients(stage) and settings.accumulate > 1 and settings.no_sync:
            yield Holding("buffers", "", "device", sum(kind.padded_numel * size for kind, size in wire))
        elif shards_gradients(stage):
            count = min(BUFFERS, sum(kind.count for kind in buckets.trained))
            yield Holding("buffers", "", "device", count * largest)
        if settings.device == "cpu":
            yield Holding("scratch", "", "device", scratch_nbytes(largest, stage, settings))
    link = recipe.param_ring_nbytes + recipe.keep_ring_nbytes if settings.device != "cpu" else 0
    yield Holding("ring", "", "cpu", recipe.ring_nbytes + link)


def scratch_nbytes(largest: int, stage: int, settings: Arrangement) -> int:
    """What the spans of other ranks are received into: of the largest bucket, and in the round among copies of it.

    >>> [scratch_nbytes(1024, stage, Arrangement(2, "cpu", 1, 1, False, replicate=2)) for stage in (0, 1)]
    [512, 768]
    """
    span = largest // settings.world
    first, second = (settings.world - 1) * span, (settings.replicate - 1) * -(-span // settings.replicate)
    if shards_state(stage):
        return first + second
    return max(first, (settings.replicate - 1) * -(-largest // settings.replicate))


def _inputs(subject: Outline, recipe: Recipe, settings: Arrangement) -> Iterator[Holding]:
    """Activations, logits and loss; or what checkpoints keep, off the device all but the last one's and room for one
    that comes, and what computes beside them."""
    shape = subject.transformer
    if shape is None or not shape.has_activations:
        return
    rows = None if recipe.keep is None else -(-(shape.batch or 1) // settings.micro)
    activations, logits = shape.peak(rows)
    yield Holding("activations", "", "device", activations)
    yield Holding("logits", "", "device", logits)
    if recipe.keep is None:
        return
    away = 0 if recipe.keep == "device" else shape.checkpoints - shape.checkpoint
    yield Holding("checkpoints", "", recipe.keep, away)
    yield Holding("checkpoints", "", "device", min(shape.checkpoints - away + shape.checkpoint, shape.checkpoints))


def pinned_nbytes(subject: Outline, recipe: Recipe, stage: int, settings: Arrangement) -> int:
    """Bytes that rank 0's optimizer maps: locked, and pinned where CUDA is in use. Zero where nothing lies there.

    >>> from zerokern.planner.outline import subject_of
    >>> recipe = Recipe(tier="cpu")
    >>> settings = Arrangement(1, "cuda", 32 << 20, 1, False)
    >>> pinned_nbytes(subject_of("1M", recipe, None), recipe, 2, settings) / 1e6
    14.000128
    """
    twins = recipe.has_twins(settings.device)
    if recipe.optimizer == "none" or not (twins or recipe.tier == "cpu"):
        return 0
    from zerokern.memory.layout import nbytes_of  # its package needs torch, other plans do not

    pieces = subject.pieces(stage, settings.world, settings.bucket_bytes)
    nbytes = list(_with_twins(pieces, recipe) if twins else _beside(pieces, recipe))
    return nbytes_of([((one,), 1) for one in nbytes])


def _kept(recipe: Recipe, dtype: str) -> list[StateRole]:
    """As the optimizers keep them: moments, then what makes the parameter exact."""
    return sorted(recipe.state_of(dtype), key=lambda one: one.role in ("master", "remainder"))


def _with_twins(pieces: Sequence[tuple[int, str]], recipe: Recipe) -> Iterator[int]:
    """All values, all gradients, then all tensors of one key after those of another, if they are not on disk."""
    yield from (numel * itemsize(dtype) for numel, dtype in pieces)
    yield from (numel * itemsize(recipe.wire_dtype(dtype)) for numel, dtype in pieces)
    here = () if recipe.tier == "nvme" else pieces
    states = [tensor for numel, dtype in here for role in _kept(recipe, dtype) for tensor in role.tensors(numel)]
    yield from (nbytes for _, nbytes in sorted(states, key=lambda tensor: tensor[0]))


def _beside(pieces: Sequence[tuple[int, str]], recipe: Recipe) -> Iterator[int]:
    """State alone, parameter by parameter."""
    for numel, dtype in pieces:
        for role in _kept(recipe, dtype):
            yield from (nbytes for _, nbytes in role.tensors(numel))
