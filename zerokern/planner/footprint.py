"""Computes the bytes that one rank holds, by role and tier, and the bytes that it moves in a step, by role and lane.

A unit at rest is fetched for forward and again for backward, and updated where it rests. Two things are fetched once:
the last unit of forward, and parameters of no unit. A test compares the bytes of a step with those of
`zerokern.schedule.program_of`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

from zerokern.core.errors import got
from zerokern.core.units import AUTO, BUFFERS, FILLED, itemsize
from zerokern.planner.amounts import parse_device_memory
from zerokern.planner.holding import HeldMemory, Holding, Move, lanes_to
from zerokern.planner.layouts import (
    StatePiece,
    by_optimizer,
    pinned_nbytes,
    place_state,
    records_nbytes,
    round_slots_nbytes,
    slots_nbytes,
)
from zerokern.planner.matrices import Exchange, Iteration, exchange_of, iteration_flops, workspace_nbytes
from zerokern.planner.model import Buckets, BucketSize, ModelSpec, OwnedPart
from zerokern.planner.program import Volume, all_reduced, between_ranks, scratch_nbytes, traffic_of
from zerokern.planner.recipe import Arrangement, Recipe, short
from zerokern.schedule import StepProgram
from zerokern.zero.partition import STAGES, check_stage, shards_gradients, shards_parameters, shards_state

__all__ = ["Footprint", "free_for_state", "host_nbytes", "share_filled", "staying_numel", "with_recipe"]

_BACK = {"up": "down", "read": "write"}
_ALL_REDUCES = 2  # of a layer along tp in each pass: behind its attention, and behind its MLP
_FILLED_BARE = 0.75  # of a device, as far as state may fill it where activations, which nobody has said, come on top
_F = TypeVar("_F", bound="Footprint")


@dataclass(frozen=True)
class Footprint(HeldMemory):
    """The numbers of a plan. `budget`: bytes of host memory ("cpu") and of disk ("nvme") that one rank may have."""

    subject: ModelSpec
    recipe: Recipe
    settings: Arrangement
    stage: int
    device_memory: Mapping[str, int] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that can be planned: all of them, or only stage 3 if parameters rest off the device."""
        return (self.stage,) if self.recipe.rests else STAGES

    @property
    def world(self) -> int:
        """Ranks that parameters are divided among."""
        return self.settings.world

    @property
    def ranks(self) -> int:
        """All ranks, of every dimension of a mesh."""
        return self.settings.ranks

    @property
    def numel(self) -> int:
        """Parameters of the model, or of one of its tp x pp parts, without padding."""
        return self.subject.numel

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets of this stage."""
        return self.subject.buckets(self.stage, self.world, self.settings.bucket_bytes)

    @cached_property
    def lying(self) -> list[tuple[str, BucketSize]]:
        """Each bucket of parameters with the tier that it rests in, in the order of the forward."""
        recipe, sizes = self.recipe, self.buckets.sizes
        if not recipe.param_budgets:
            return [(recipe.param_tier, bucket) for bucket in sizes]
        from zerokern.memory.order import place  # its package needs torch, other plans do not

        tiers, budgets = zip(*recipe.param_budgets, (recipe.param_tier, None), strict=True)
        each = [one for bucket in sizes for one in bucket.each()]
        places = place([one.shard_nbytes for one in each], budgets)
        return [(tiers[number], bucket) for number, bucket in zip(places, each, strict=True)]

    @cached_property
    def kept_in(self) -> dict[str, int]:
        """Bytes of a batch's inputs that rest in each tier from forward to backward: of all but the latest unit."""
        shape = self.subject.activated
        return shape.checkpoints_in(self.recipe.keep_tiers, self.settings.micro) if shape else {}

    def _resting_in(self, *tiers: str) -> Buckets:
        """Returns the buckets of parameters that rest in these tiers."""
        return self.buckets.some([bucket for tier, bucket in self.lying if tier in tiers])

    @cached_property
    def copied(self) -> list[BucketSize]:
        """The kinds of trained parameters that are updated in copies in host memory."""
        if self.recipe.is_on_both_sides(self.settings.device):
            return self._resting_in("device").trained if self.recipe.optimizer != "none" else []
        return self.buckets.trained if self.recipe.has_host_copies(self.settings.device) else []

    @cached_property
    def held(self) -> tuple[Holding, ...]:  # type: ignore[override]
        """One rank's bytes, item by item. No other rank has more, except for the padding at a cut: rank 0, or the one
        with most elements of matrices that are not cut."""
        working = _working_at_rest if self.recipe.rests else _working
        stores = 1
        if self.subject.members and (self.recipe.is_muon or self.recipe.budgets):
            stores = sum(1 for some in by_optimizer(self.recipe, self.on_disk) if some)  # each opens one, if it has to
        ring = self.recipe.rings_nbytes(self.settings.device, stores)
        rings = [Holding("ring", "", "cpu", ring), Holding("ring", "", "device", self.slots_nbytes)]
        found = [*_states(self), *working(self), *rings, *_activations(self)]
        if self.muon is not None:
            on_host = self.recipe.iterates_on_host(self.settings.device)
            found.append(Holding("iteration", "", "cpu" if on_host else "device", self.muon.workspace))
        return tuple(part for part in found if part.nbytes)

    @cached_property
    def slots_nbytes(self) -> int:
        """Bytes of the device that state streams through (`update="device"`).

        >>> zk.plan("8B", tier="cpu", update="device").slots_nbytes / (1 << 20)
        256.0
        """
        recipe = self.recipe
        if not recipe.streams(self.settings.device):
            return 0
        pieces = [one.part for one in self.placed if one.tier == "cpu"]
        all_of_it = self.buckets.pieces(needed_first=True)
        some = by_optimizer(recipe, pieces if self.placed else all_of_it)
        if not (recipe.is_muon and shards_parameters(self.stage) and self.world > 1):
            return sum(slots_nbytes(recipe, one) for one in some)
        cut = self.buckets.cut_matrices
        return round_slots_nbytes(recipe, cut, some[0], self.buckets.rank, self.world) + slots_nbytes(recipe, some[1])

    @cached_property
    def on_disk(self) -> list[OwnedPart]:
        """The parts whose state is on the disk, in the optimizer's order; none of a bare number of parameters."""
        if self.recipe.tier != "nvme" or self.recipe.optimizer == "none" or not self.subject.members:
            return []
        if self.placed:
            return [one.part for one in self.placed if one.tier == "nvme" and one.nbytes]
        return self.buckets.pieces()

    @cached_property
    def records(self) -> list[int]:
        """Bytes on the disk of Muon's state and of AdamW's beside it, in whole pages, which a step reads and writes.

        None with another optimizer: it has records of one size, so that pages add nothing that counts.

        >>> zk.plan("gpt2", optimizer="muon", tier="nvme", device="cpu").records  # of 84,934,656 and 39,505,152
        [509607936, 395100160]
        """
        return records_nbytes(self.recipe, self.on_disk) if self.on_disk and self.recipe.is_muon else []

    @cached_property
    def muon(self) -> Iteration | None:
        """What Muon's matrices cost; None with another optimizer.

        >>> zk.plan("gpt2", optimizer="muon").muon.matrices
        48
        """
        if not self.recipe.is_muon:
            return None
        subject, buckets, world, recipe = self.subject, self.buckets, self.world, self.recipe
        whole = subject.whole
        trained = [member for member in subject.members if member.trainable]
        numel = sum(one.numel for one in whole)
        dtype = recipe.iterates_in(self.settings.device)
        on_host = self.settings.device == "cpu" or recipe.iterates_on_host(self.settings.device)
        asked = recipe.ns_form, recipe.ns_steps, recipe.ns_coefficients
        weigh = partial(iteration_flops, dtype=dtype, form=asked[0], steps=asked[1], coefficients=asked[2])
        flops = sum(map(weigh, whole))
        if not shards_parameters(self.stage):
            made = Exchange(buckets.most_work(weigh) if shards_state(self.stage) else flops, [0], 0)
        else:
            one_by_one = recipe.tier == "nvme" or (recipe.tier == "cpu" and not on_host)  # beside state that moves
            turns = recipe.schedule != "sync" or recipe.param_tier == "nvme"
            made = exchange_of(
                buckets.cut_matrices, world, itemsize(dtype), pairs=not one_by_one, turns=turns, weigh=weigh
            )
        rounds = made.nbytes if world > 1 else 0
        return Iteration(
            dtype,
            len(whole),
            numel,
            len(trained) - len(whole),
            sum(member.numel for member in trained) - numel,
            flops=flops,
            rank_flops=made.work,
            imbalance=made.work * world / flops - 1 if shards_state(self.stage) and flops else 0.0,
            padding=buckets.whole_padding,
            workspace=workspace_nbytes(
                whole, dtype, form=recipe.ns_form, rounds=rounds, place="cpu" if on_host else "cuda"
            ),
            exchanged=sum(made.sent) * itemsize(dtype),
            rank_exchanged=max(made.sent) * itemsize(dtype),
        )

    @cached_property
    def pinned(self) -> int:
        """Bytes that a rank's optimizer locks in host memory (`tier="cpu"`), in whole pages; CUDA has them pinned.

        >>> round(zk.plan("1B", tier="cpu").pinned / 1e9, 3)
        14.0
        """
        recipe = self.recipe
        has_copies = bool(self.copied) or recipe.delays_at_rest
        if recipe.optimizer == "none" or not (has_copies or recipe.tier == "cpu" or recipe.budgets):
            return 0
        pieces = self.buckets.pieces()
        in_memory = pieces if recipe.tier != "nvme" or not has_copies else []
        if self.placed:
            pieces = [one.part for one in self.placed if one.tier != "device"]
            in_memory = [one.part for one in self.placed if one.tier == "cpu"]
        pairs = zip(by_optimizer(recipe, pieces), by_optimizer(recipe, in_memory), strict=True)
        return sum(pinned_nbytes(recipe, self.settings.device, *pair, self.copied) for pair in pairs)

    @cached_property
    def budgets(self) -> tuple[tuple[str, int], ...]:
        """The tiers that are filled before `recipe.tier`, each with the most bytes of state there.

        >>> run = zk.plan("8B", tier=["device:auto", "cpu"], device_memory="80GB")
        >>> run.budgets  # 0.75 * 80 GB less parameters and gradients
        (('device', 28000000000),)
        """
        asked, free = self.recipe.budgets, 0
        if any(budget == AUTO for _, budget in asked):
            free = max(0, free_for_state(self))
        return tuple((tier, free if budget == AUTO else budget) for tier, budget in asked)

    @cached_property
    def placed(self) -> list[StatePiece]:
        """The tier of each piece of the state, in the order in which forwards need them, where `tier=` has budgets."""
        recipe = self.recipe
        if not recipe.budgets:
            return []
        pieces = self.buckets.pieces(needed_first=True)
        return place_state(recipe, pieces, self.budgets)

    @cached_property
    def program(self) -> StepProgram:
        """The step in order: what is gathered, computed, released, reduced, updated and published."""
        return between_ranks(self.buckets, self.recipe, self.stage, self.settings)

    @cached_property
    def traffic(self) -> Volume:
        """What one optimizer step moves between the ranks."""
        return traffic_of(self.program, self.world, 0 if self.muon is None else self.muon.rank_exchanged)

    @cached_property
    def sent(self) -> dict[str, int | None]:
        """Bytes that one rank sends in a step, by dimension of its mesh. None: the model does not say.

        >>> zk.plan("8B", stage=3, mesh={"replicate": 2, "dp": 4, "tp": 2}).sent
        {'replicate': 2000000000, 'dp': 18000000000, 'tp': None}
        """
        settings, shape, recipe = self.settings, self.subject.activated, self.recipe
        found: dict[str, int | None] = {}
        passed = 0 if shape is None else shape.checkpoint * settings.accumulate  # bytes between two layers
        if settings.pp > 1:  # activations to the next stage, their gradients to the one before
            found["pp"] = min(2, settings.pp - 1) * passed if shape else None
        if settings.replicate > 1:  # what the reduction along dp leaves of a bucket becomes the mean of all copies
            times, total = 1 if settings.no_sync else settings.accumulate, 0
            for bucket in [bucket for bucket in self.buckets.sizes if bucket.trainable]:
                numel = bucket.shard_numel if shards_state(self.stage) else bucket.padded_numel
                total += times * all_reduced(numel, settings.replicate) * recipe.wire_itemsize(bucket.dtype)
            found["replicate"] = total
        if settings.world > 1:
            found["dp"] = self.traffic.sent_nbytes
        if settings.tp > 1:
            passes = 2 if recipe.keep is None else 3  # forward, again where it is recomputed, backward
            count = passes * _ALL_REDUCES * settings.accumulate
            found["tp"] = count * shape.layers * all_reduced(shape.checkpoint, settings.tp) if shape else None
        return found

    @cached_property
    def moves(self) -> list[Move]:
        """What a rank moves over its link and to and from its disk; what ranks send each other is `traffic`."""
        sums = Counter[tuple[str, str]]()
        for move in _moves(self):
            sums[move.role, move.lane] += move.nbytes
        return [Move(role, lane, nbytes) for (role, lane), nbytes in sums.items() if nbytes]

    def moved(self, lane: str) -> int:
        """Returns bytes over one lane in a step, of one rank: "down", "up", "read", "write".

        >>> on_disk = zk.plan("1B", stage=3, param_tier="nvme", tier="nvme", schedule="overlap")
        >>> {lane: on_disk.moved(lane) / 1e9 for lane in ("up", "down", "read", "write")}
        {'up': 4.0, 'down': 2.0, 'read': 14.0, 'write': 12.0}
        """
        return sum(move.nbytes for move in self.moves if move.lane == lane)

    @property
    def kept(self) -> int:
        """Bytes of inputs that leave the device in a step and are fetched again."""
        return sum(nbytes for tier, nbytes in self.kept_in.items() if tier != "device") * self.settings.accumulate

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that a rank lacks, by memory; empty if everything fits.

        >>> zk.plan("8B", stage=3, param_tier="cpu", tier="cpu", host_memory="100GB").missing
        {'host memory': 12000000000}
        """
        found = {name: self.total - most for name, most in self.device_memory.items()}
        names = {"cpu": "host memory", "nvme": "disk"}
        held = {**self.tiers, "cpu": host_nbytes(self)}
        found |= {names[tier]: held.get(tier, 0) - most for tier, most in self.budget.items()}
        return {name: nbytes for name, nbytes in found.items() if nbytes > 0}

    def fits(self, device_memory: int | str) -> bool:
        """Returns whether `total` is at most a device's memory: bytes, '80GB', '80GiB' or a name such as 'h100'.

        >>> zk.plan("7.5B", world=8, stage=3).fits("h100")
        True
        """
        (nbytes,) = parse_device_memory(device_memory).values()
        return self.total <= nbytes

    def spilling(self: _F) -> _F:
        """Returns the same run, in which gradients of parameters at rest wait on disk if host memory has no room for
        them, by the rule of zerokern.memory.room.
        """
        most = self.budget.get("cpu")
        has_disk = "nvme" in (self.recipe.param_tier, self.recipe.tier)
        if most is None or not self.recipe.rests or not has_disk:
            return self
        if self.settings.device == "cpu":
            wait = self.recipe.param_tier == "nvme" and 2 * self.roles.get("gradients", 0) > most
        else:
            wait = self.tiers.get("cpu", 0) > most
        return replace(self, settings=replace(self.settings, spills=True)) if wait else self

    @cached_property
    def _others(self: _F) -> dict[int, _F]:
        return {stage: self if stage == self.stage else replace(self, stage=stage) for stage in self.stages}

    def at(self: _F, stage: int) -> _F:
        """Returns the same run at another stage.

        >>> [zk.plan("1T", world=1024).at(stage).states // 10**9 for stage in (0, 3)]
        [14000, 13]
        """
        if check_stage(stage) not in self._others:
            raise ValueError(got("stage", stage, f"{self.stage}, for parameters that rest off the device"))
        return self._others[stage]

    def in_other_formats(self: _F) -> list[_F]:
        """Returns the same run in every state and master format that its parameters can have, the exact ones first."""
        recipes = self.recipe.alternatives(self.subject.main_dtype)
        return [with_recipe(self, recipe, self.stage) for recipe in recipes]


def staying_numel(run: Footprint, dtype: str | None = None) -> int:
    """Returns the elements of parameters that are updated on the device, beside an update in host memory.

    >>> staying_numel(zk.plan("1B", tier=["device:1GB", "cpu"]))
    100000000
    """
    kept = [one.part for one in run.placed if one.tier == "device" and run.settings.device != "cpu"]
    return sum(part.numel for part in kept if dtype in (None, part.dtype))


def host_nbytes(run: Footprint) -> int:
    """Returns bytes of host memory; of a CPU's, the device's are.

    >>> host_nbytes(zk.plan("1B", tier="cpu")) // 10**9
    14
    """
    return run.tiers.get("cpu", 0) + (run.total if run.settings.device == "cpu" else 0)


def share_filled(run: Footprint) -> float:
    """Returns the share of a device that state may fill, beside what a step needs there."""
    return FILLED if run.subject.activated else _FILLED_BARE


def free_for_state(run: Footprint) -> int:
    """Returns the bytes that the smallest device has left at a step's peak, up to that share."""
    without = replace(run, recipe=replace(run.recipe, budgets=()))
    gradients = sum(_gradient_numel(kind, run) * run.recipe.wire_itemsize(kind.dtype) for kind in run.buckets.trained)
    stay = max(0, gradients - _leaving_nbytes(without))  # beside state that stays they do, too
    return int(share_filled(run) * min(run.device_memory.values(), default=0)) - without.total - stay


def with_recipe(run: _F, recipe: Recipe, stage: int) -> _F:
    """Returns the same run with another recipe, whose gradients wait on disk only if they must."""
    return replace(run, recipe=recipe, stage=stage, settings=replace(run.settings, spills=False)).spilling()


def _states(run: Footprint) -> Iterator[Holding]:
    """Yields parameters, gradients and optimizer state, by the tier that they rest in."""
    recipe, settings, trained = run.recipe, run.settings, run.buckets.trained
    most = _leaving_nbytes(run)
    tiers = {tier: run._resting_in(tier) for tier in dict.fromkeys(tier for tier, _ in run.lying)}
    for tier, buckets in tiers.items():
        for kind in buckets.kinds:
            numel = kind.shard_numel if shards_parameters(run.stage) else kind.padded_numel
            yield Holding("parameters", short(kind.dtype), tier, numel * kind.itemsize)
    for tier, buckets in tiers.items():
        host = "device" if tier == "device" or settings.device == "cpu" else "cpu"
        for kind in buckets.trained:
            nbytes = _gradient_numel(kind, run) * recipe.wire_itemsize(kind.dtype)
            if host == "device":
                nbytes = min(nbytes, most)
                most -= nbytes
            yield Holding(
                "gradients", short(recipe.wire_dtype(kind.dtype)), "nvme" if settings.spills else host, nbytes
            )
    yield from _optimizer_state(run)
    for kind in run.copied:
        numel = kind.own_numel - staying_numel(run, kind.dtype)
        yield Holding("host parameters", short(kind.dtype), "cpu", numel * kind.itemsize)
        yield _host_gradients(run, kind, numel)
    # parameters that a delayed update has made wait beside those that are in use, unless host copies can hold them
    waits = recipe.delays_at_rest if recipe.rests else run.copied and settings.device != "cpu"
    for kind in trained if recipe.delays and waits else ():
        numel = kind.own_numel
        yield Holding("shadow", short(kind.dtype), "cpu" if recipe.rests else "device", numel * kind.itemsize)
        if recipe.rests:  # the update reads gradients while the next backward makes others
            yield _host_gradients(run, kind, numel)


def _host_gradients(run: Footprint, kind: BucketSize, numel: int) -> Holding:
    wire = run.recipe.wire_dtype(kind.dtype)
    return Holding("host gradients", short(wire), "cpu", numel * itemsize(wire))


def _optimizer_state(run: Footprint) -> Iterator[Holding]:
    for kind in run.buckets.trained:
        for is_matrix, numel, blocks in kind.by_rule():
            for state in run.recipe.state_of(kind.dtype, is_matrix):
                nbytes = state.nbytes * (blocks if state.is_scale else numel)
                yield Holding(state.role, state.format, run.recipe.tier, nbytes)
    for one in run.placed:
        for state, nbytes in one.tensors if one.tier != run.recipe.tier else ():
            yield Holding(state.role, state.format, run.recipe.tier, -nbytes)
            yield Holding(state.role, state.format, one.tier, nbytes)


def _leaving_nbytes(run: Footprint) -> int:
    """Returns the most bytes of gradients on a device that they leave bucket by bucket during backward: of those on
    their way, and of one that is filled. Without a limit where they stay until `step()`, or another pass adds to them.
    """
    recipe, settings = run.recipe, run.settings
    leaves = settings.device != "cpu" and recipe.has_host_copies(settings.device) and recipe.schedule == "overlap"
    if not leaves or recipe.budgets or settings.accumulate > 1 or not shards_state(run.stage):
        return sys.maxsize
    parts = run.world if shards_gradients(run.stage) else 1
    sizes = [kind.largest_numel * recipe.wire_itemsize(kind.dtype) for kind in run.buckets.trained]
    return (BUFFERS + 1) * -(-max(sizes) // parts)


def _gradient_numel(kind: BucketSize, run: Footprint) -> int:
    """Returns the elements of gradients; below stage 2 the reduced shard lies in the whole bucket, unless the next
    micro-batch needs that."""
    if shards_gradients(run.stage):
        return kind.shard_numel
    settings = run.settings
    moves_out = run.world > 1 and settings.accumulate > 1 and not settings.no_sync and shards_state(run.stage)
    return kind.padded_numel + (kind.shard_numel if moves_out else 0)


def _working(run: Footprint) -> Iterator[Holding]:
    """Yields what is allocated besides the states while a step runs."""
    settings, buckets, stage = run.settings, run.buckets, run.stage
    if not settings.has_others:
        return
    wire = run.recipe.wire_itemsize
    largest = max((kind.largest_numel * wire(kind.dtype) for kind in buckets.trained), default=0)
    if shards_parameters(stage) and run.world > 1 and (run.subject.units or settings.pp > 1):
        stays = settings.pp > 1  # from a step's first micro-batch to its last
        nbytes = sum(bucket.nbytes for bucket in buckets.sizes) if stays else buckets.gathered_nbytes
        yield Holding("gathered", "", "device", nbytes)
    if run.world > 1 and shards_gradients(stage):
        if settings.accumulate > 1 and settings.no_sync:
            nbytes = sum(kind.padded_numel * wire(kind.dtype) for kind in buckets.trained)
        else:
            nbytes = min(BUFFERS, sum(kind.count for kind in buckets.trained)) * largest
            if run.subject.matrices and not shards_parameters(stage):
                nbytes = buckets.in_backward_nbytes(run.recipe, settings.device)
        yield Holding("buffers", "", "device", nbytes)
    if settings.device == "cpu":
        yield Holding("scratch", "", "device", scratch_nbytes(largest, stage, settings))


def _working_at_rest(run: Footprint) -> Iterator[Holding]:
    """Yields fetched parameters (of the unit that computes, of the next one, and on a CPU of one that its update hands
    over) and gradients on their way out."""
    settings, buckets, recipe = run.settings, run.buckets, run.recipe
    if run.world == 1:  # the shard of what is on the device is whole
        buckets = run._resting_in("cpu", "nvme")
    if run.subject.units:
        hands_over = settings.device == "cpu" and recipe.schedule == "overlap" and recipe.param_tier == "nvme"
        units_nbytes = (sum(bucket.shard_nbytes for bucket in u) for u in run._resting_in("nvme").beside_root)
        handed = max(units_nbytes, default=0) if hands_over else 0
        yield Holding("gathered", "", "device", buckets.gathered_nbytes + handed)
    wire = recipe.wire_itemsize
    largest = max((kind.largest_numel * wire(kind.dtype) for kind in buckets.trained), default=0)
    units = ([bucket for bucket in unit if bucket.trainable] for unit in buckets.by_unit)
    of_unit = max((sum(bucket.padded_numel * wire(bucket.dtype) for bucket in unit) for unit in units), default=0)
    if settings.micro > 1 and run.subject.units:  # slices are added in a unit's own gradients, which leave together
        largest = of_unit
    if settings.spills and settings.device == "cpu":  # of a unit that is updated, a bucket on its way
        yield Holding("buffers", "", "device", of_unit + largest)
    else:
        yield Holding("buffers", "", "device", BUFFERS * largest)
    if settings.device == "cpu" and settings.has_others:
        yield Holding("scratch", "", "device", scratch_nbytes(largest, run.stage, settings))


def _activations(run: Footprint) -> Iterator[Holding]:
    """Yields activations, logits and loss; with `keep`, checkpoints: those at rest, and the last and the next here."""
    shape, keep = run.subject.activated, run.recipe.keep
    if shape is None:
        return
    rows = None if keep is None else -(-(shape.batch or 1) // run.settings.micro)
    activations, logits = shape.peak(rows)
    yield Holding("activations", "", "device", activations)
    yield Holding("logits", "", "device", logits)
    if keep is not None:
        yield from (Holding("checkpoints", "", tier, nbytes) for tier, nbytes in run.kept_in.items())
        coming = min(shape.checkpoint, run.kept // run.settings.accumulate)
        yield Holding("checkpoints", "", "device", shape.checkpoint + coming)


def _moves(run: Footprint) -> Iterator[Move]:
    recipe, settings = run.recipe, run.settings
    if recipe.rests:
        yield from _moves_at_rest(run)
    if settings.device != "cpu":
        for kind in run.copied:
            numel = kind.own_numel - staying_numel(run, kind.dtype)
            yield Move("gradients", "down", numel * recipe.wire_itemsize(kind.dtype))
            yield Move("parameters", "up", numel * kind.itemsize)
    if recipe.streams(settings.device):
        for state in (state for state in _optimizer_state(run) if state.tier == "cpu"):
            yield from (Move(state.role, lane, state.nbytes) for lane in ("up", "down"))
    if recipe.tier == "nvme":
        states = [state for state in _optimizer_state(run) if state.tier == "nvme"]
        padding = sum(run.records) - sum(state.nbytes for state in states) if run.records else 0
        for lane in ("read", "write"):
            yield from (Move(state.role, lane, state.nbytes) for state in states)
            yield Move("padding", lane, padding)
    for tier, nbytes in run.kept_in.items():
        for lane in lanes_to(tier, settings.device):
            yield from (Move("checkpoints", to, nbytes * settings.accumulate) for to in (_BACK[lane], lane))


def _moves_at_rest(run: Footprint) -> Iterator[Move]:
    """Yields the moves of resting parameters: they are fetched and stored, gradients of each micro-batch leave, and
    those on disk are read to add to them and by the update."""
    recipe, settings, buckets = run.recipe, run.settings, run.buckets
    for tier in ("cpu", "nvme"):
        here = run._resting_in(tier)
        whole, root = (sum(bucket.shard_nbytes for bucket in some) for some in (here.sizes, here.root))
        for lane in lanes_to(tier, settings.device):
            yield Move("parameters", lane, settings.accumulate * (2 * whole - root - here.last_unit_nbytes))
    if recipe.optimizer != "none" and recipe.param_tier == "nvme":
        updated = sum(kind.own_numel * kind.itemsize for kind in run._resting_in("nvme").trained)
        yield Move("parameters", "write", updated)
        if recipe.schedule != "overlap":  # which hands over what it has updated to the next forward
            yield Move("parameters", "read", updated)
    own = sum(kind.own_numel * recipe.wire_itemsize(kind.dtype) for kind in buckets.trained)
    if settings.device != "cpu":
        leaving = run._resting_in("cpu", "nvme").trained
        down = sum(kind.own_numel * recipe.wire_itemsize(kind.dtype) for kind in leaving)
        yield Move("gradients", "down", down * settings.accumulate)
    if settings.spills:
        yield Move("gradients", "write", own * settings.accumulate)
        yield Move("gradients", "read", own * settings.accumulate)
