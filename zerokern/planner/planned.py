"""Bytes and traffic of a planned training run, as numbers: what its tables, forecasts and advice are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from zerokern.core.errors import got
from zerokern.core.units import RING_NBYTES
from zerokern.planner.amounts import parse_device_memory
from zerokern.planner.dimensions import sent_along
from zerokern.planner.outline import Outline
from zerokern.planner.program import Volume, between_ranks, traffic_of
from zerokern.planner.recipe import Arrangement, Recipe
from zerokern.planner.rest import Move, moves_of
from zerokern.planner.share import Share, pinned_nbytes, share_of
from zerokern.schedule import Program
from zerokern.zero.partition import STAGES, check_stage

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PlannedRun"]


@dataclass(frozen=True)
class PlannedRun:
    """A training run at one stage; the same run at other stages, placements and formats.

    >>> from zerokern.planner import plan
    >>> run = plan("7.5B", stage=2, world=64, master_format="fp32")
    >>> run.roles["gradients"] // 10**6, round(run.traffic.numel / run.numel, 3)
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

        >>> from zerokern.planner import plan
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
    def sent(self) -> dict[str, int | None]:
        """Bytes that one rank sends in a step, by dimension of its mesh. None: the model does not say.

        >>> from zerokern.planner import plan
        >>> plan("8B", stage=3, mesh={"replicate": 2, "dp": 4, "tp": 2}).sent
        {'replicate': 2000000000, 'dp': 18000000000, 'tp': None}
        """
        return sent_along(self.subject, self.recipe, self.stage, self.settings, self.traffic.sent_nbytes)

    @cached_property
    def moves(self) -> list[Move]:
        """What one rank moves in a step over its link ("down", "up") and from and to its disk ("read", "write").

        >>> from zerokern.planner import plan
        >>> plan("1B", stage=3, param_tier="cpu", tier="cpu").moves
        [Move(role='parameters', lane='up', nbytes=4000000000), Move(role='gradients', lane='down', nbytes=2000000000)]
        """
        return moves_of(self.subject, self.recipe, self.stage, self.settings)

    def moved(self, lane: str) -> int:
        """Bytes over one lane in a step, of one rank: "down", "up", "read", "write".

        >>> from zerokern.planner import plan
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

        >>> from zerokern.planner import plan
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

    def would_fit(self) -> list[Self]:
        """The same run with what is needed least off the device, as far as it fits: exact formats, then lossy ones.

        >>> from zerokern.planner import plan
        >>> found = plan("20B", device_memory="v100", host_memory="128GiB", disk="1TB").would_fit()
        >>> [(one.recipe.param_tier, one.recipe.tier, one.recipe.is_lossy()) for one in found][:3]
        [('cpu', 'nvme', False), ('nvme', 'nvme', False), ('cpu', 'nvme', True)]
        """
        found: list[Self] = []
        for one in self._elsewhere():
            if not one.missing and all(one.recipe != other.recipe for other in found):
                found.append(one)
        return found

    def _elsewhere(self) -> Iterator[Self]:
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

    def spilling(self) -> Self:
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
    def _others(self) -> dict[int, Self]:
        return {stage: self if stage == self.stage else replace(self, stage=stage) for stage in self.stages}

    def at(self, stage: int) -> Self:
        """The same run at another stage.

        >>> from zerokern.planner import plan
        >>> [plan("1T", world=1024).at(stage).states // 10**9 for stage in (0, 3)]
        [14000, 13]
        """
        if check_stage(stage) not in self._others:
            raise ValueError(got("stage", stage, f"{self.stage}, for parameters that rest off the device"))
        return self._others[stage]

    def fits(self, device_memory: int | str) -> bool:
        """Whether `total` is at most a device's memory: bytes, '80GB', '80GiB' or a name such as 'h100'.

        >>> from zerokern.planner import plan
        >>> plan("7.5B", world=8, stage=3).fits("h100")
        True
        """
        (nbytes,) = parse_device_memory(device_memory).values()
        return self.total <= nbytes

    def in_other_formats(self) -> list[Self]:
        """The same run in every state and master format that its parameters can have, the exact ones first."""
        settings = replace(self.settings, spills=False)
        recipes = self.recipe.alternatives(self.subject.main_dtype)
        return [replace(self, recipe=recipe, settings=settings).spilling() for recipe in recipes]


def _rings(tier: str, param_tier: str, keep: str | None) -> dict[str, Any]:
    """Host memory that disks are read and written through."""
    places = {"ring_nbytes": tier, "param_ring_nbytes": param_tier, "keep_ring_nbytes": keep}
    return {name: RING_NBYTES * (place == "nvme") for name, place in places.items()}
