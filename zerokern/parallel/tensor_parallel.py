"""Models under torch's tensor parallelism: of each DTensor parameter the local tensor is what zk.shard shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from zerokern.comm import Group, MeshGroups
from zerokern.core.errors import ShardError, got
from zerokern.zero.kinds import here_of, is_placed, local_of
from zerokern.zero.units import RankGroups

__all__ = ["groups_on", "mesh_of"]


def groups_on(mesh: DeviceMesh | None, group: Group, *, replicated: bool) -> RankGroups:
    """The ranks that parameters concern of which `group` shards the local parts; `mesh`: of those that are DTensors.

    >>> import torch
    >>> groups_on(None, Group(0, 1, torch.device("cpu"), "alone"), replicated=False).copies
    1
    """
    if mesh is None:
        return RankGroups.of(group, replicated=replicated)
    team = MeshGroups(mesh, range(mesh.ndim), [] if replicated else [group])
    everyone = MeshGroups(mesh, range(mesh.ndim), [group.everyone])
    for one in (everyone, team):
        one.join()
    return RankGroups(group, team, everyone, group.everyone, copies=mesh.size(), place=mesh.get_coordinate())


def mesh_of(params: Sequence[tuple[str, Tensor]]) -> DeviceMesh | None:
    """The mesh that the DTensors among named parameters are placed on; None where there are none.

    >>> mesh_of([("weight", Tensor())]) is None
    True
    """
    found: list[tuple[str, Any]] = [(name, param) for name, param in params if is_placed(param)]
    for name, param in found:
        _check(name, param)
        if param.device_mesh != found[0][1].device_mesh:
            raise ShardError(
                f"{name!r} is a DTensor on {param.device_mesh}, {found[0][0]!r} on {found[0][1].device_mesh}; allowed: "
                "one mesh for all DTensors of a model, as parallelize_module has it"
            )
    return found[0][1].device_mesh if found else None


def _check(name: str, param: Any) -> None:
    odd = [one for one in param.placements if type(one) not in (Shard, Replicate)]
    if odd:
        do = f"{name}.redistribute(placements=...) before zk.shard, or shard models that parallelize_module has divided"
        raise ShardError(got(f"{name}.placements", tuple(param.placements), "Shard and Replicate", do))
    if param.device_mesh.get_coordinate() is None:
        raise ShardError(f"{name!r} is a DTensor on {param.device_mesh}, which this rank is not part of")
    local, sizes = local_of(param), here_of(param).sizes
    if type(local) not in (Tensor, nn.Parameter):
        raise TypeError(got(f"{name}.to_local()", type(local).__name__, "a plain tensor"))
    if local.shape != sizes:
        do = "every rank must hold what its placements say"
        raise ShardError(got(f"the shape of {name}.to_local()", tuple(local.shape), f"{sizes}", do))
