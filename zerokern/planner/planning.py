"""`zk.plan`: bytes and traffic of a training run before anything of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import BudgetError, got
from zerokern.core.units import RING_NBYTES
from zerokern.planner import table, tiers
from zerokern.planner.advice import advice, advised, each_memory
from zerokern.planner.amounts import Memory, gigabytes, parse_device_memory, parse_memory
from zerokern.planner.dimensions import sent_along, sizes_of, told
from zerokern.planner.outline import Outline, subject_of
from zerokern.planner.program import Volume, between_ranks, traffic_of
from zerokern.planner.recipe import Arrangement, Recipe
from zerokern.planner.rest import Move, moves_of
from zerokern.planner.shapes import named
from zerokern.planner.share import Share, pinned_nbytes, share_of
from zerokern.schedule import Delayed, Machine, StepProgram, machine_of
from zerokern.zero.partition import STAGES, check_stage

if TYPE_CHECKING:
    from zerokern.planner.forecast import Forecast

__all__ = ["Plan", "plan"]

_BUCKET_BYTES = 32 << 20
_RANKS_PER_HOST = 8  # of a usual node, unless it is said


@dataclass(frozen=True)
class Plan:
    """Bytes per rank by role and tier, and what moves in a step: at one stage, with all others beside it.

    Its text is a table for a design document. `at(stage)` is the same run at another stage.

    >>> import zerokern as zk
    >>> plan = zk.plan("7.5B", stage=2, world=64, master_format="fp32")
    >>> round(plan.states / 1e9, 1), round(plan.at(3).states / 1e9, 2), plan.fits("40GB")
    (16.6, 1.88, True)
    >>> plan.roles["gradients"] // 10**6, round(plan.traffic.numel / plan.numel, 3)
    (234, 2.0)
    """

    subject: Outline
    recipe: Recipe
    settings: Arrangement
    stage: int
    device_memory: Mapping[str, int] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    """bytes of host memory ("cpu") and of disk ("nvme") that one rank may have, as far as they are known"""

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that can be planned so: all of them, or the third alone where parameters rest off the device."""
        return (self.stage,) if self.recipe.rests else STAGES

    @property
    def world(self) -> int:
        """Ranks that divide parameters among them."""
        return self.settings.world

    @property
    def ranks(self) -> int:
        """All ranks: of every dimension of a mesh."""
        return self.settings.ranks

    @property
    def numel(self) -> int:
        """Parameters of the model, or of the part that a rank of tp x pp shares, without padding."""
        return self.subject.numel

    @cached_property
    def share(self) -> Share:
        """One rank's part, item by item."""
        return share_of(self.subject, self.recipe, self.stage, self.settings)

    @property
    def roles(self) -> dict[str, int]:
        """Bytes per rank by role, all tiers together."""
        return self.share.roles

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes per rank by tier, all roles together."""
        return self.share.tiers

    @property
    def states(self) -> int:
        """Bytes per rank of parameters, gradients and optimizer state: what the ZeRO paper counts."""
        return self.share.states

    @property
    def total(self) -> int:
        """Bytes per rank on the device; activations are among them only where the shape of a transformer says them."""
        return self.share.total

    @cached_property
    def pinned(self) -> int:
        """Bytes that a rank's optimizer locks in host memory (`tier="cpu"`), in whole pages; CUDA has them pinned.

        >>> plan("1B", tier="cpu").pinned / 1e9
        14.0000...
        """
        return pinned_nbytes(self.subject, self.recipe, self.stage, self.settings)

    @cached_property
    def program(self) -> StepProgram:
        """The step in order: what is gathered, computed, released, reduced, updated and published."""
        buckets = self.subject.buckets(self.stage, self.world, self.settings.bucket_bytes)
        return between_ranks(buckets.loads, self.subject.units, self.recipe, self.stage, self.settings)

    @cached_property
    def traffic(self) -> Volume:
        """What one optimizer step moves between the ranks."""
        return traffic_of(self.program, self.world)

    @cached_property
    def sent(self) -> dict[str, int | None]:
        """Bytes that one rank sends in a step, by dimension of its mesh. None: the model does not say.

        >>> plan("8B", stage=3, mesh={"replicate": 2, "dp": 4, "tp": 2}).sent
        {'replicate': 2000000000, 'dp': 18000000000, 'tp': None}
        """
        return sent_along(self.subject, self.recipe, self.stage, self.settings, self.traffic.sent_nbytes)

    @cached_property
    def moves(self) -> list[Move]:
        """What one rank moves in a step over its link ("down", "up") and from and to its disk ("read", "write").

        >>> plan("1B", stage=3, param_tier="cpu", tier="cpu").moves
        [Move(role='parameters', lane='up', nbytes=4000000000), Move(role='gradients', lane='down', nbytes=2000000000)]
        """
        return moves_of(self.subject, self.recipe, self.stage, self.settings)

    def moved(self, lane: str) -> int:
        """Bytes over one lane in a step, of one rank: "down", "up", "read", "write".

        >>> on_disk = plan("1B", stage=3, param_tier="nvme", tier="nvme", schedule="overlap")
        >>> {lane: on_disk.moved(lane) / 1e9 for lane in ("up", "down", "read", "write")}
        {'up': 4.0, 'down': 2.0, 'read': 14.0, 'write': 12.0}
        """
        return sum(one.nbytes for one in self.moves if one.lane == lane)

    @property
    def kept(self) -> int:
        """Bytes of inputs that leave the device in a step, and come back."""
        return max((one.nbytes for one in self.moves if one.role == "checkpoints"), default=0)

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that a rank lacks, by the memory that does not have them; empty where all of it fits.

        >>> plan("8B", stage=3, param_tier="cpu", tier="cpu", host_memory="100GB").missing
        {'host memory': 12000000000}
        """
        found = {name: self.total - most for name, most in self.device_memory.items()}
        names = {"cpu": "host memory", "nvme": "disk"}
        held = dict(self.tiers)
        if self.settings.device == "cpu":  # whose memory is the host's
            held["cpu"] = held.get("cpu", 0) + self.total
        found |= {names[tier]: held.get(tier, 0) - most for tier, most in self.budget.items()}
        return {name: nbytes for name, nbytes in found.items() if nbytes > 0}

    def require(self) -> None:
        """Raises `BudgetError` where `device_memory`, `host_memory` or `disk` is too small, with what would fit.

        >>> plan("70B", stage=3, param_tier="cpu", tier="cpu", host_memory="128GiB").require()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        zerokern.core.errors.BudgetError: 70B parameters, on 1 rank do not fit: 843 GB of host memory are missing
        ...
        """
        if self.missing:
            lacks = " and ".join(f"{gigabytes(nbytes)} GB of {name}" for name, nbytes in self.missing.items())
            raise BudgetError(f"{table.title(self)} do not fit: {lacks} are missing\n\n{self}")

    def would_fit(self) -> list[Plan]:
        """The same run with what is needed least off the device, as far as it fits: exact formats, then lossy ones.

        >>> found = plan("20B", device_memory="v100", host_memory="128GiB", disk="1TB").would_fit()
        >>> [(one.recipe.param_tier, one.recipe.tier, one.recipe.is_lossy()) for one in found][:3]
        [('cpu', 'nvme', False), ('nvme', 'nvme', False), ('cpu', 'nvme', True)]
        """
        found: list[Plan] = []
        for one in self._elsewhere():
            if not one.missing and all(one.recipe != other.recipe for other in found):
                found.append(one)
        return found

    def _elsewhere(self) -> Iterator[Plan]:
        """Every placement, in exact formats and in small ones; inputs where they are, and then elsewhere."""
        exact, lossy = self.recipe, [one for one in self.recipe.alternatives(self.subject.main_dtype) if one.is_lossy()]
        small = [one for one in lossy if one.master_format != "none"]
        if exact.is_lossy():
            exact, small = replace(exact, state_format="fp32", master_format=None), [exact, *small]
        small = sorted(small, key=lambda one: one.state_nbytes(self.subject.main_dtype))[:1]
        keeps = dict.fromkeys((self.recipe.keep, *(("cpu", "nvme") if self.recipe.keep else ())))
        places = [("device", "cpu"), ("cpu", "cpu"), ("device", "nvme"), ("cpu", "nvme"), ("nvme", "nvme")]
        for recipe, keep, (param_tier, tier) in product([exact, *small], keeps, places):
            here = replace(recipe, tier=tier, param_tier=param_tier, keep=keep, **_rings(tier, param_tier, keep))
            settings = replace(self.settings, spills=False)
            yield replace(self, recipe=here.on(settings.device, 3), stage=3, settings=settings).spilling()

    def spilling(self) -> Plan:
        """The same, but gradients of parameters at rest wait on the disk if they do not fit in host memory."""
        most = self.budget.get("cpu")
        has_disk = "nvme" in (self.recipe.param_tier, self.recipe.tier)
        if most is None or not self.recipe.rests or not has_disk:
            return self
        if self.settings.device == "cpu":  # the rule of zerokern.memory.room, before anything is there
            wait = self.recipe.param_tier == "nvme" and 2 * self.roles.get("gradients", 0) > most
        else:
            wait = self.tiers.get("cpu", 0) > most
        return replace(self, settings=replace(self.settings, spills=True)) if wait else self

    @cached_property
    def _others(self) -> dict[int, Plan]:
        return {stage: self if stage == self.stage else replace(self, stage=stage) for stage in self.stages}

    def at(self, stage: int) -> Plan:
        """The same run at another stage.

        >>> [plan("1T", world=1024).at(stage).states // 10**9 for stage in (0, 3)]
        [14000, 13]
        """
        if check_stage(stage) not in self._others:
            raise ValueError(got("stage", stage, f"{self.stage}, for parameters that rest off the device"))
        return self._others[stage]

    def fits(self, device_memory: int | str) -> bool:
        """Whether `total` is at most a device's memory: bytes, '80GB', '80GiB' or a name such as 'h100'.

        >>> plan("7.5B", world=8, stage=3).fits("h100")
        True
        """
        (nbytes,) = parse_device_memory(device_memory).values()
        return self.total <= nbytes

    def advice(self) -> str:
        """The cheapest exact configuration that fits into `device_memory`, over all stages and tiers: the answer, its
        code and its assumptions, on three lines.

        Where nothing fits: what would, with fewer activations, in lossy formats, or on more ranks.

        >>> print(plan("8B", world=8, device_memory="80GB").advice())
        Cheapest exact configuration that fits: stage 1 on 8 ranks, 42.0 of 80.0 GB before activations
        Code: zk.shard(model, stage=1); opt = zk.AdamW(model.parameters())
        Assumed: bf16 parameters; activations come on top; nothing for the driver, NCCL and fragments of the allocator
        """
        return advice(self)

    def advised(self) -> list[Plan]:
        """The plan of what `advice` names first, of each device in `device_memory`; none where nothing would fit.

        >>> [(one.stage, one.fits("80GB")) for one in plan("8B", world=8, device_memory="80GB").advised()]
        [(1, True)]
        """
        return [found[0][1] for _, one in each_memory(self) if (found := advised(one))]

    def page(self, *, formats: bool = True) -> str:
        """The plan as text, as `str` has it; or without what it would take in other formats.

        >>> "state_format  " in plan("1B").page(), "state_format  " in plan("1B").page(formats=False)
        (True, False)
        """
        of = tiers.of_resting if self.recipe.rests else table.of_plan
        return of(self, formats=formats)

    def predict(self, machine: str | os.PathLike[str] | Machine, tokens: Sequence[int] | None = None) -> Forecast:
        """What a step takes on a described machine: without offload, and with the update on the host at each schedule.

        machine: a name (`zerokern.schedule.shipped()`), a JSON file, or a `zerokern.schedule.Machine`.
        tokens: of one rank in one optimizer step.

        >>> found = plan("1B", state_format="int8", master_format="split8").predict("h200-pcie", tokens=[16_384])
        >>> [f"{row.schedule} {row.of_resident:.0%}" for row in found.rows]
        ['no offload 100%', 'sync 49%', 'overlap, plain 61%', 'overlap 76%', 'delayed 101%']
        """
        from zerokern.planner.forecast import USUAL, forecast

        if self.settings.tp * self.settings.pp > 1:
            do = "A step of one part alone: zk.plan(part, world=...)"
            raise ValueError(got("mesh", told(self.settings), "dp and replicate: others wait for each other", do))
        return forecast(self, machine_of(machine), USUAL if tokens is None else tokens)

    def in_other_formats(self) -> list[Plan]:
        """The same run in every state and master format that its parameters can have, the exact ones first."""
        settings = replace(self.settings, spills=False)
        recipes = self.recipe.alternatives(self.subject.main_dtype)
        return [replace(self, recipe=recipe, settings=settings).spilling() for recipe in recipes]

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, for programs: bytes by role and tier at each stage, and the traffic.

        >>> plan("1B").to_dict()["stages"][0]["roles"]["exp_avg"]
        4000000000
        """
        return table.as_dict(self)

    def __str__(self) -> str:
        return self.page()


def plan(
    model: Any,
    *,
    stage: int = 2,
    world: int = 1,
    mesh: Any = None,
    optimizer: str | None = "adamw",
    mp_policy: Any = None,
    param_dtype: Any = None,
    reduce_dtype: Any = None,
    state_format: str = "fp32",
    master_format: str | None = None,
    tier: Any = "device",
    param_tier: Any = "device",
    keep: Any = None,
    micro: int = 1,
    schedule: str | Delayed = "sync",
    units: Any = None,
    bucket_bytes: int = _BUCKET_BYTES,
    accumulate: int = 1,
    no_sync: bool = False,
    device: str | None = None,
    device_memory: Memory = None,
    host_memory: int | str | None = None,
    disk: int | str | None = None,
    ranks_per_host: int | None = None,
) -> Plan:
    """What each rank of a training run holds and sends, at every stage, before anything of it is allocated.

    Args:
        model: a module, on the meta device as well; a number of parameters (`7_500_000_000`, `"7.5B"`), of which units
            and tensors are not known; a published model by name (`"llama-3-8b"`); or a `zerokern.planner.Transformer`,
            such as `preset("llama-3-8b", batch=1, seq=4096)` there, which knows its activations too: with
            attention="eager" scores are among them, by default not.
        stage: whose step and notes are shown; the table has all of them.
        world: ranks.
        mesh: in place of `world`, a DeviceMesh, or sizes by name for ranks that nobody has at hand: `{"pp": 2,
            "replicate": 2, "dp": 8, "cp": 2, "tp": 4}`. A module is what one stage of pp has, and divided along tp
            already (`parallelize_module`); of a number or a shape the part is planned that a rank of tp x pp has.
            `Plan.sent` is what goes along each dimension. With pp, `accumulate` micro-batches are reduced once.
        optimizer: "adamw", "adam", "lion", "adagrad", "sgd", "sgd-momentum"; None plans none.
        mp_policy: as in `zk.shard`.
        param_dtype, reduce_dtype: in its place, also as text. A bare number is of bf16 parameters by default.
        state_format, master_format: as in `zk.AdamW`.
        tier: where optimizer state rests, as in `zk.AdamW`; "nvme" stands for `zk.Nvme(path)`.
        param_tier: where parameters rest at stage 3: `zk.shard(tier=)`.
        keep, micro: as in `zk.shard`; without them activations are whole. Each of `accumulate` fetches what rests anew.
        schedule: when the optimizer updates, as in `zk.AdamW`.
        units, bucket_bytes: as in `zk.shard`.
        accumulate: micro-batches in a step, each of them reduced.
        no_sync: all of these but the last are under `zk.no_sync`.
        device: "cuda" or "cpu", whose collectives need memory of their own; default: the model's, else "cuda".
        device_memory: what to compare with: "80GB", "h100,32GiB", a mapping of names to bytes.
        host_memory, disk: what a host has. Gradients of parameters at rest wait on the disk where they do not fit in
            host memory. `Plan.require()` refuses what does not fit.
        ranks_per_host: how many share that; default: all ranks, at most 8.

    >>> import zerokern as zk
    >>> print(zk.plan(torch.nn.Linear(1024, 1024), stage=1, world=4))  # doctest: +ELLIPSIS
    ### Linear, 1M parameters in 2 tensors, on 4 ranks
    ...
    """
    check_stage(stage)
    recipe = Recipe.of(
        optimizer=optimizer,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        mp_policy=mp_policy,
        state_format=state_format,
        master_format=master_format,
        tier=tier,
        schedule=schedule,
        param_tier=param_tier,
        keep="device" if keep is None and micro != 1 else keep,
    )
    memory = parse_device_memory(device_memory)
    settings = Arrangement(world, device or "cuda", bucket_bytes, accumulate, no_sync, micro)
    if mesh is not None:
        if world != 1:
            raise ValueError(got("world", world, "no world beside mesh, which says how many ranks there are"))
        sizes: dict[str, Any] = sizes_of(mesh)
        settings = replace(settings, **sizes)
    subject = subject_of(named(model), recipe, units, settings.tp, settings.pp)
    settings = replace(settings, tp=subject.tp, device=device or subject.device)
    if settings.pp > 1 and accumulate > 1:
        settings = replace(settings, no_sync=True)  # as zk.PipelineStage has it
    recipe = recipe.on(settings.device, stage)
    if recipe.rests and settings.no_sync:
        allowed = "False for parameters at rest, whose gradients would gather on the device"
        raise ValueError(got("no_sync", no_sync, allowed, "micro=M has one pass over the parameters for all slices"))
    made = Plan(subject, recipe, settings, stage, memory, _budget(host_memory, disk, settings.ranks, ranks_per_host))
    for dtype in sorted({member.dtype for member in subject.members if member.trainable} or {subject.dtype}):
        recipe.state_of(dtype)  # refuses here what cannot be
    recipe.has_twins(made.settings.device)
    return made.spilling()


def _rings(tier: str, param_tier: str, keep: str | None) -> dict[str, Any]:
    """Host memory that disks are read and written through."""
    places = {"ring_nbytes": tier, "param_ring_nbytes": param_tier, "keep_ring_nbytes": keep}
    return {name: RING_NBYTES * (place == "nvme") for name, place in places.items()}


def _budget(
    host_memory: int | str | None, disk: int | str | None, world: int, ranks_per_host: int | None
) -> dict[str, int]:
    """What one rank has of a host's memory and of its disk."""
    ranks = min(world, _RANKS_PER_HOST) if ranks_per_host is None else ranks_per_host
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= world:
        raise ValueError(got("ranks_per_host", ranks_per_host, f"a whole number of ranks, from 1 to world={world}"))
    asked = {"cpu": ("host_memory", host_memory), "nvme": ("disk", disk)}
    return {tier: parse_memory(name, one) // ranks for tier, (name, one) in asked.items() if one is not None}
