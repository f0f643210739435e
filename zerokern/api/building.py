"""zk.build: a model that is larger than one rank's memory is constructed in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zerokern.api.sharding import BUCKET_BYTES
from zerokern.comm import during, group_on
from zerokern.zero.construction import Construction
from zerokern.zero.partition import check_stage
from zerokern.zero.sharding import Sharding

__all__ = ["build"]


def build(fn: Callable[[], nn.Module], *, device: torch.device | str | None = None, **shard_kwargs: Any) -> nn.Module:
    """`zk.shard(fn(), **shard_kwargs)`, with the parameters of one unit in memory at a time.

    The same bits, from the same random numbers. `fn` runs once, as it is; what its operators compute is noted, and
    memory that has not been used for a while is emptied. It is computed again when somebody reads it, and, on every
    rank, when its unit is sharded. So a weight is initialised twice. What cannot be computed again (read from a file,
    looked at through numpy) stays in memory. Rank 0's values count. Parameters on the meta device get theirs by
    `reset_parameters`.

    >>> import torch, zerokern as zk
    >>> model = zk.build(lambda: torch.nn.Linear(4, 2), stage=3)
    >>> model.weight.shape
    torch.Size([2, 4])
    """
    settings = {
        "stage": 2,
        "mesh": None,
        "mp_policy": None,
        "units": None,
        "bucket_bytes": BUCKET_BYTES,
        **shard_kwargs,
    }
    unknown = sorted(set(shard_kwargs) - {"stage", "mesh", "mp_policy", "units", "bucket_bytes"})
    if unknown:
        raise TypeError(f"zk.build got {', '.join(unknown)}; allowed: the keywords of zk.shard, and device")
    stage = check_stage(settings.pop("stage"))
    mesh = settings.pop("mesh")
    with during("zk.build", of="zk.shard"):
        group = group_on(mesh, torch.get_default_device() if device is None else device)
    construction = Construction(group.device)
    module = construction.run(fn)
    with during("zk.build", of="zk.shard"):
        Sharding(module, stage=stage, group=group, materialize=construction.materialize, **settings)
    return module
