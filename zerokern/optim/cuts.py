"""How a DTensor is divided: which elements of the whole are here, and its state shown and taken in the same cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zerokern.core.errors import StateError
from zerokern.kernels.formats import BLOCK, blocks
from zerokern.zero.sharded import Sharded

__all__ = ["Cut", "over"]

_OTHER_PLACE = (
    "{name}: state {key!r} holds {held}, and this rank's are {here}; it was kept on another rank, or divided in "
    "another way. Load whole tensors, or a checkpoint with torch.distributed.checkpoint, which divides it anew"
)


class Cut:
    """How a DTensor is divided: the box of its elements that is here, and where that begins.

    `start` is the flat number of the first of them. `spans`: on every rank they are consecutive elements of the whole,
    in the order of the whole.
    """

    def __init__(self, tensor: DTensor) -> None:
        self.mesh, self.placements = tensor.device_mesh, tuple(tensor.placements)
        self.shape, self.stride = tensor.shape, tensor.stride()
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        self.local_shape, self.offsets = torch.Size(sizes), tuple(offsets)
        self.numel = self.local_shape.numel()
        flat = sum(offset * math.prod(self.shape[dim + 1 :]) for dim, offset in enumerate(self.offsets))
        self.start = min(flat, self.shape.numel())
        self.dims = tuple(dim for dim, placement in enumerate(self.placements) if not placement.is_replicate())
        sharded = {getattr(self.placements[dim], "dim", 0) for dim in self.dims}
        self.dim = next(iter(sharded)) if len(sharded) == 1 else -1
        self.spans = not sharded or (self.dim >= 0 and math.prod(self.shape[: self.dim]) == 1)

    @property
    def aligned(self) -> bool:
        """Whether every rank begins with a whole block of the parameter, as int8 state needs."""
        return self.spans and (not self.dims or self._blocks_per_rank is not None)

    @property
    def misaligned(self) -> str:
        """Why int8 state is refused where that is not so."""
        where = f"a shape of {tuple(self.shape)} under {self.placements} of {self.mesh}"
        return f"With {where}, not every rank begins with a block of {BLOCK}"

    @property
    def _blocks_per_rank(self) -> int | None:
        """Blocks on a rank that has its full share; None where some rank would begin within one."""
        ranks = math.prod(self.mesh.size(dim) for dim in self.dims)
        rows, row = self.shape[self.dim], math.prod(self.shape[self.dim + 1 :])
        if len(self.dims) > 1 and rows % ranks:  # cut unevenly twice: no one share
            return None
        share = -(-rows // ranks) * row
        return blocks(share) if share % BLOCK == 0 or ranks == 1 or share >= rows * row else None

    def _scale_placements(self) -> tuple[Any, ...] | None:
        """Under which the scales of the blocks are cut as their blocks are, if any DTensor can say that."""
        if not self.dims:
            return self.placements
        ranks = math.prod(self.mesh.size(dim) for dim in self.dims)
        plain = all(type(self.placements[dim]) is Shard for dim in self.dims)
        if not plain or -(-blocks(self.shape.numel()) // ranks) != self._blocks_per_rank:
            return None
        return tuple(Shard(0) if dim in self.dims else Replicate() for dim in range(self.mesh.ndim))

    def span(self, key: str) -> tuple[torch.Size, int, int]:
        """The shape of state of that name, and (start, numel) of this rank's elements of it."""
        if not key.endswith("_scale"):
            return self.shape, self.start, self.numel
        return torch.Size([blocks(self.shape.numel())]), self.start // BLOCK, blocks(self.numel)

    def show(self, key: str, value: Tensor, before: Any = None, *, name: str = "", group: Any = None) -> Tensor:
        """This rank's flat elements of state, without a copy, as a tensor of the logical shape."""
        shape, start, _ = self.span(key)
        placements, stride, local_shape = self.placements, self.stride, self.local_shape
        if key.endswith("_scale"):
            found = self._scale_placements()
            if found is None:
                if isinstance(before, Sharded) and before.local is value:
                    return before
                return Sharded(value, shape, start, name=f"{name}.{key}", kind="state", group=group)
            placements, stride, local_shape = found, (1,), value.shape
        if isinstance(before, DTensor) and _holds(before, value) and before.placements == placements:
            return before
        with torch.no_grad():
            return over(value.detach().view(local_shape), self.mesh, placements, shape, stride)

    def take(self, name: str, key: str, value: Tensor, *, own: bool = False) -> Tensor:
        """The other way, also of a whole tensor: 1-D, a view where that is possible, unless it is to `own` it."""
        shape, start, numel = self.span(key)
        if value.shape != shape:
            raise StateError(
                f"{name}: state {key!r} has shape {tuple(value.shape)}, and {tuple(shape)} is needed, that of the "
                "whole parameter; this state belongs to another parameter"
            )
        if isinstance(value, Sharded):
            if (value.start, value.local.numel()) == (start, numel):
                return value.local
            held = f"elements {value.start}:{value.start + value.local.numel()}"
            raise StateError(_OTHER_PLACE.format(name=name, key=key, held=held, here=f"{start}:{start + numel}"))
        if isinstance(value, DTensor):
            expected = self._scale_placements() if key.endswith("_scale") else self.placements
            if expected is None or tuple(value.placements) != tuple(expected) or value.device_mesh != self.mesh:
                held = f"what {tuple(value.placements)} of {value.device_mesh} leaves here"
                here = f"{expected} of {self.mesh}"
                raise StateError(_OTHER_PLACE.format(name=name, key=key, held=held, here=here))
            return value.to_local().detach().reshape(-1)
        if key.endswith("_scale"):
            mine = value.detach()[start : start + numel]
        else:
            box = zip(self.offsets, self.local_shape, strict=True)
            mine = value.detach()[tuple(slice(begin, begin + size) for begin, size in box)].reshape(-1)
        return mine.clone() if own and numel < value.numel() else mine


def _holds(shown: DTensor, value: Tensor) -> bool:
    local = shown._local_tensor
    same = local.numel() == value.numel() and local.dtype == value.dtype and local.device == value.device
    return same and local.data_ptr() == value.data_ptr()


def over(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """A DTensor over that very memory, wherever it is: `from_local` alone would move it to the mesh's device."""
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))
    like = DTensor.from_local(
        torch.empty_like(local, device="meta"), mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )
    return DTensor(local, like._spec, requires_grad=False)
