"""`zk.plan`: bytes and traffic of a training run before anything of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import BudgetError, got
from zerokern.planner import table, tiers
from zerokern.planner.advice import advice, advised, each_memory
from zerokern.planner.amounts import Memory, gigabytes, parse_device_memory, parse_memory
from zerokern.planner.dimensions import sizes_of, told
from zerokern.planner.outline import subject_of
from zerokern.planner.planned import PlannedRun
from zerokern.planner.recipe import Arrangement, Recipe
from zerokern.planner.shapes import named
from zerokern.schedule import Delayed, Machine, machine_of
from zerokern.zero.partition import check_stage

if TYPE_CHECKING:
    from zerokern.planner.forecast import Forecast

__all__ = ["Plan", "plan"]

_BUCKET_BYTES = 32 << 20
_RANKS_PER_HOST = 8  # of a usual node, unless it is said


@dataclass(frozen=True)
class Plan(PlannedRun):
    """Bytes per rank by role and tier, and what moves in a step: at one stage, with all others beside it.

    Its text is a table for a design document. `at(stage)` is the same run at another stage.

    >>> import zerokern as zk
    >>> plan = zk.plan("7.5B", stage=2, world=64, master_format="fp32")
    >>> round(plan.states / 1e9, 1), round(plan.at(3).states / 1e9, 2), plan.fits("40GB")
    (16.6, 1.88, True)
    >>> plan.roles["gradients"] // 10**6, round(plan.traffic.numel / plan.numel, 3)
    (234, 2.0)
    """

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


def _budget(
    host_memory: int | str | None, disk: int | str | None, world: int, ranks_per_host: int | None
) -> dict[str, int]:
    """What one rank has of a host's memory and of its disk."""
    ranks = min(world, _RANKS_PER_HOST) if ranks_per_host is None else ranks_per_host
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= world:
        raise ValueError(got("ranks_per_host", ranks_per_host, f"a whole number of ranks, from 1 to world={world}"))
    asked = {"cpu": ("host_memory", host_memory), "nvme": ("disk", disk)}
    return {tier: parse_memory(name, one) // ranks for tier, (name, one) in asked.items() if one is not None}
