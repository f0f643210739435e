"""What sharding needs to know of DTensor parameters: what stands for one at stage 3, and the largest part of one."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import Shard

from zerokern.zero.kinds import SLOTS, is_placed
from zerokern.zero.sharded import Sharded

__all__ = ["ShardedDTensor", "largest_local_numel"]


class _Slotted(Tensor):
    """An object with the slots of a DTensor: only such can take each other's place."""

    __slots__ = SLOTS


class ShardedDTensor(Sharded, _Slotted):
    """Stands for a DTensor parameter between its uses at stage 3."""


def largest_local_numel(tensor: Tensor) -> int:
    """How many elements of a tensor the rank has that has most of them.

    >>> import torch
    >>> largest_local_numel(torch.ones(2, 3))
    6
    """
    if not is_placed(tensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // size)
    return math.prod(sizes)
