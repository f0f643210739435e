"""Where the shards of parameters rest at stage 3: beside what computes, or in a place of another tier."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokern.comm import Group
from zerokern.core.errors import got
from zerokern.memory import Copies, HostTier, Rests, Wanted
from zerokern.memory import tier as tiers
from zerokern.memory.rest import GOING
from zerokern.memory.staging import EMULATED_DRIVERS, CudaDriver
from zerokern.memory.tier import AnyTier, config_of
from zerokern.zero.lifting import Lift
from zerokern.zero.partition import Bucket, shards_parameters

__all__ = ["check_tier", "driver_of", "laid_out", "lies_on", "own_name", "rests_on"]

_REPLACED = (
    "these parameters are gone: they rested in {where}, which a model that was sharded later in this process has "
    "taken over. Use that model, or give each a folder of its own: tier=zk.Nvme(another path)"
)
ADVICE = "More ranks, a narrower dtype, or tier=zk.Nvme(path) would take less of each machine's memory"


def check_tier(tier: object, stage: int) -> AnyTier:
    """Returns the tier that was asked for, or raises an error that says what there is at this stage."""
    found = tiers.check_tier("tier", tier)
    if found != "device" and not shards_parameters(stage):
        do = f"at stage {stage} parameters are whole between steps; choose stage=3"
        raise ValueError(got("tier", tier, "'device' below stage 3", do))
    return found


def rests_on(tier: AnyTier, group: Group) -> Rests | None:
    """What shards rest in; None where they stay in memory. Each rank of a machine has room of its own."""
    config = config_of(tier)
    if config is None:
        return None
    opened = config.open(own_name("parameters", group.rank), "parameters")
    rests = Rests(opened)
    opened.gives_way = partial(_give_way, weakref.ref(rests), _REPLACED.format(where=opened))
    return rests


def _give_way(there: weakref.ref[Rests], because: str) -> str:
    rests = there()
    return because if rests is None or rests.close(because) else ""


def own_name(name: str, rank: int = 0) -> str:
    """The name of this rank's own room in a tier; `rank`: its number where there is no process group.

    >>> own_name("parameters", 3)
    'parameters-3'
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else rank
    return f"{name}-{rank}"


def driver_of(device: torch.device, params: Sequence[Tensor]) -> Any:
    """What copies to and from the device that these compute on go through; None: they compute in host memory.

    A device that torch does not know forgets them, for they are about to have another body: see `lies_on`.
    """
    played = [driver for param in params if (driver := EMULATED_DRIVERS.pop(param, None)) is not None]
    return CudaDriver(device) if device.type == "cuda" else next(iter(played), None)


def lies_on(driver: Any, tensors: Sequence[Tensor]) -> None:
    """These lie on the device, where torch does not know that by itself."""
    if driver is not None and not isinstance(driver, CudaDriver):
        for one in tensors:
            EMULATED_DRIVERS[one] = driver


def laid_out(tier: AnyTier, rests: Rests | None, driver: Any, buckets: Sequence[Bucket]) -> Sequence[dict[str, Any]]:
    """Where this rank's shard of each bucket is, for its `BucketMemory`: room for all, before anything is changed."""
    wanted = [Wanted("parameters", torch.Size([one.shard_numel]), getattr(torch, one.dtype)) for one in buckets]
    if rests is not None:
        found = [{"rest": rests.make(role, shape.numel(), dtype)} for role, shape, dtype in wanted]
        units: Counter[int] = Counter()
        for bucket, one in zip(buckets, found, strict=True):
            units[bucket.unit] += one["rest"].nbytes
        largest = max(units.values(), default=0)
        rests.pages.most_nbytes = 2 * largest  # of the unit that computes, and of the next
        rests.leaving_nbytes = max(rests.leaving_nbytes, GOING + largest)  # an update hands it over to its forward
        if driver is None:
            return found
        config = config_of(tier)
        assert config is not None
        lift = Lift(driver, config.ring_nbytes, "zk.shard")
        return [{**one, "lift": lift, "host": lift.host} for one in found]
    if driver is None or tier == "device":
        return [{}] * len(buckets)
    host = HostTier("zk.shard", ADVICE, copies=Copies(driver))
    return [{"host": host, "kept": kept} for kept in host.lay_out(wanted)]
