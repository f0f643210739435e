"""Where the shards of parameters rest at stage 3: beside what computes, or in a place of another tier."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from zerokern.comm import Group
from zerokern.core.errors import got
from zerokern.io import Nvme
from zerokern.io.place import NvmePlace
from zerokern.memory import Rest, Rests
from zerokern.zero.partition import Bucket, shards_parameters

__all__ = ["check_tier", "rest_of_bucket", "rests_on"]


def check_tier(tier: object, stage: int) -> str | Nvme:
    """The tier that was asked for, or an error that says what there is."""
    if not isinstance(tier, Nvme) and tier not in ("device", "cpu"):
        do = "a folder becomes a tier with zk.Nvme(path)" if isinstance(tier, str | os.PathLike) else ""
        raise ValueError(got("tier", tier, "'device', 'cpu' or zk.Nvme(path)", do))
    if tier != "device" and not shards_parameters(stage):
        do = f"at stage {stage} parameters are whole between steps; choose stage=3"
        raise ValueError(got("tier", tier, "'device' below stage 3", do))
    return tier  # type: ignore[return-value]


def rests_on(tier: str | Nvme, group: Group) -> Rests | None:
    """Who takes shards in; None where they stay in memory. Each rank of a machine has a folder of its own."""
    if not isinstance(tier, Nvme):
        return None
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else group.rank
    own = replace(tier, path=os.path.join(tier.path, f"parameters-{rank}"))
    return Rests(NvmePlace(own, "parameters", staged=False))


def rest_of_bucket(rests: Rests, bucket: Bucket) -> Rest:
    """Where this rank's shard of a bucket is while nobody uses it."""
    return rests.make("parameters", bucket.shard_numel, getattr(torch, bucket.dtype))
