"""`zk.plan`: bytes and traffic of a training run before anything of it is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zerokern.planner import table
from zerokern.planner.amounts import Memory, parse_device_memory
from zerokern.planner.outline import Outline, subject_of
from zerokern.planner.program import Volume, between_ranks, traffic_of
from zerokern.planner.recipe import Arrangement, Recipe
from zerokern.planner.share import Share, pinned_nbytes, share_of
from zerokern.schedule import Delayed, Machine, Program, machine_of
from zerokern.zero.partition import STAGES, check_stage

if TYPE_CHECKING:
    from zerokern.planner.forecast import Forecast

__all__ = ["Plan", "plan"]

_BUCKET_BYTES = 32 << 20


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

    @property
    def world(self) -> int:
        return self.settings.world

    @property
    def numel(self) -> int:
        """Parameters of the model, without padding."""
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
    def program(self) -> Program:
        """The step in order: what is gathered, computed, released, reduced, updated and published."""
        buckets = self.subject.buckets(self.stage, self.world, self.settings.bucket_bytes)
        return between_ranks(buckets.loads, self.subject.units, self.recipe, self.stage, self.settings)

    @cached_property
    def traffic(self) -> Volume:
        """What one optimizer step moves between the ranks."""
        return traffic_of(self.program, self.world)

    @cached_property
    def _others(self) -> dict[int, Plan]:
        return {stage: self if stage == self.stage else replace(self, stage=stage) for stage in STAGES}

    def at(self, stage: int) -> Plan:
        """The same run at another stage.

        >>> [plan("1T", world=1024).at(stage).states // 10**9 for stage in (0, 3)]
        [14000, 13]
        """
        return self._others[check_stage(stage)]

    def fits(self, device_memory: int | str) -> bool:
        """Whether `total` is at most a device's memory: bytes, '80GB', '80GiB' or a name such as 'h100'.

        >>> plan("7.5B", world=8, stage=3).fits("h100")
        True
        """
        (nbytes,) = parse_device_memory(device_memory).values()
        return self.total <= nbytes

    def predict(self, machine: str | os.PathLike[str] | Machine, tokens: Sequence[int] | None = None) -> Forecast:
        """What a step takes on a described machine: without offload, and with the update on the host at each schedule.

        machine: a name (`zerokern.schedule.shipped()`), a JSON file, or a `zerokern.schedule.Machine`.
        tokens: of one rank in one optimizer step.

        >>> found = plan("1B", state_format="int8", master_format="split8").predict("h200-pcie", tokens=[16_384])
        >>> [f"{row.schedule} {row.of_resident:.0%}" for row in found.rows]
        ['no offload 100%', 'sync 49%', 'overlap, plain 61%', 'overlap 76%', 'delayed 101%']
        """
        from zerokern.planner.forecast import USUAL, forecast

        return forecast(self, machine_of(machine), USUAL if tokens is None else tokens)

    def in_other_formats(self) -> list[Plan]:
        """The same run in every state and master format that its parameters can have, the exact ones first."""
        return [replace(self, recipe=recipe) for recipe in self.recipe.alternatives(self.subject.main_dtype)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, for programs: bytes by role and tier at each stage, and the traffic.

        >>> plan("1B").to_dict()["stages"][0]["roles"]["exp_avg"]
        4000000000
        """
        return table.as_dict(self)

    def __str__(self) -> str:
        return table.of_plan(self)


def plan(
    model: Any,
    *,
    stage: int = 2,
    world: int = 1,
    optimizer: str | None = "adamw",
    mp_policy: Any = None,
    param_dtype: Any = None,
    reduce_dtype: Any = None,
    state_format: str = "fp32",
    master_format: str | None = None,
    tier: Any = "device",
    schedule: str | Delayed = "sync",
    units: Any = None,
    bucket_bytes: int = _BUCKET_BYTES,
    accumulate: int = 1,
    no_sync: bool = False,
    device: str | None = None,
    device_memory: Memory = None,
) -> Plan:
    """What each rank of a training run holds and sends, at every stage, before anything of it is allocated.

    model: a module, on the meta device as well; a number of parameters (`7_500_000_000`, `"7.5B"`), of which units and
        tensors are not known; or a `zerokern.planner.Transformer`, which knows its activations too.
    world: ranks. The other keywords are those of `zk.shard` and of the optimizers.
    param_dtype, reduce_dtype: in place of `mp_policy`, also as text. A bare number is of bf16 parameters by default.
    accumulate: micro-batches in a step, each of them reduced; with `no_sync`, all but the last under `zk.no_sync`.
    device: "cuda" or "cpu", whose collectives need memory of their own; default: the model's, else "cuda".
    device_memory: what to compare with: "80GB", "h100,32GiB", a mapping of names to bytes.

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
    )
    memory = parse_device_memory(device_memory)
    settings = Arrangement(world, device or "cuda", bucket_bytes, accumulate, no_sync)
    subject = subject_of(model, recipe, units)
    if device is None:
        settings = replace(settings, device=subject.device)
    made = Plan(subject, recipe, settings, stage, memory)
    for dtype in sorted({member.dtype for member in subject.members if member.trainable} or {subject.dtype}):
        recipe.state_of(dtype)  # refuses here what cannot be
    recipe.has_twins(made.settings.device)
    return made
