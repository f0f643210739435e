"""Models under torch's tensor parallelism: of each DTensor parameter the local tensor is what zk.shard divides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from zerokern.comm import Group, Team
from zerokern.core.errors import ShardError, got
from zerokern.zero.kinds import SLOTS, here_of, is_placed, local_of
from zerokern.zero.sharded import Sharded

__all__ = ["PLACE", "Beside", "ShardedDTensor", "mesh_of", "most_of", "refuse_placed"]

PLACE = "place in the mesh of DTensors"  # of a rank, as ranks compare it


class _Slotted(Tensor):
    """An object as a DTensor is one: only such can take each other's place."""

    __slots__ = SLOTS


class ShardedDTensor(Sharded, _Slotted):
    """What a DTensor parameter is at rest at stage 3."""


class Beside:
    """The ranks that share a model: those of `group` divide it, those of a mesh beside have other parts, or the same.

    `team`: the ranks that norms are summed over, None where each has all; `copies`: how many of them have the same
    elements of a parameter that is no DTensor; `hearing`: those who have a gradient where one of them has.

    >>> import torch
    >>> one = Beside(None, Group(0, 1, torch.device("cpu"), "alone"), replicated=False)
    >>> one.copies, one.place, one.team is one.everyone
    (1, None, True)
    """

    def __init__(self, mesh: DeviceMesh | None, group: Group, *, replicated: bool) -> None:
        self.group, self.hearing = group, group.everyone
        self.place = None if mesh is None else mesh.get_coordinate()
        self.copies = 1 if mesh is None else mesh.size()
        self.team: Group | Team | None = None if replicated else group
        self.everyone: Any = group.everyone  # those with copies too
        if mesh is not None:
            self.team = Team(mesh, range(mesh.ndim), [] if replicated else [group])
            self.everyone = Team(mesh, range(mesh.ndim), [group.everyone])
            for one in (self.everyone, self.team):
                one.join()

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all."""
        return self.group.everyone.rank == 0 and not any(self.place or ())


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


def most_of(tensor: Tensor) -> int:
    """How many elements that rank has which has most.

    >>> import torch
    >>> most_of(torch.ones(2, 3))
    6
    """
    if not is_placed(tensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // size)
    return math.prod(sizes)


def refuse_placed(params: Sequence[tuple[str, Tensor]], *, built: bool) -> None:
    """Raise where DTensors are among parameters that are `built` here, or compute in slices: neither knows them.

    >>> refuse_placed([("weight", Tensor())], built=True)
    """
    found = next((name for name, param in params if is_placed(param)), None)
    if found is not None and built:
        raise ShardError(
            f"zk.build made {found!r} as a DTensor, and computes plain tensors alone again; allowed: build, "
            "parallelize_module, then zk.shard(model, ...)"
        )
    if found is not None:
        raise ShardError(
            f"{found!r} is a DTensor, and micro above 1 computes in slices of plain tensors; allowed: micro=1, and "
            "micro-batches in a loop"
        )


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
