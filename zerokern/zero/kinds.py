"""Says what a tensor is (plain, a span of zk.shard's, a DTensor): which of its elements are on this rank, and where.

The one switch on kinds of tensors; everybody else asks `here_of` for the elements, and `local_of` for their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zerokern.core.errors import StateError
from zerokern.kernels.formats import BLOCK, blocks
from zerokern.memory.here import Here
from zerokern.zero.sharded import Sharded, Spanned, known_shard
from zerokern.zero.tiers import fetched

__all__ = [
    "SLOTS",
    "Distributed",
    "Placed",
    "ShardedDTensor",
    "here_of",
    "is_divided",
    "is_placed",
    "is_replicated",
    "largest_local_numel",
    "local_of",
    "over",
    "present",
    "shardings_of",
    "shown_as",
    "splits_of",
    "take",
    "version_of",
    "without_waiting",
]


#: context manager: parameters are looked at as they are, and nobody waits for an update of them
without_waiting = torch._C.DisableTorchFunctionSubclass
Distributed: Any = DTensor  # the base of what takes the place of one
SLOTS = tuple(DTensor.__slots__)  # where its object keeps what it consists of


def here_of(tensor: Tensor) -> Here:
    """Returns which elements of a tensor are on this rank; for a piece, those of its parameter.

    >>> here_of(Sharded(torch.ones(4), torch.Size([2, 3]), 0)).boxes()
    [((0, 0), (1, 3), 0), ((1, 0), (1, 1), 3)]
    """
    if isinstance(tensor, DTensor):
        return Placed.by(tensor)
    if isinstance(tensor, Sharded):
        return tensor.here
    shard = known_shard(tensor)
    if shard is not None and tensor is shard.piece:
        return shard.here
    return Here.span(tensor.shape, 0, tensor.numel())


def local_of(tensor: Tensor) -> Tensor:
    """Returns the plain tensor in which this rank keeps these elements; of a plain tensor, the tensor itself.

    >>> local_of(Sharded(torch.ones(4), torch.Size([2, 3]), 0))
    tensor([1., 1., 1., 1.])
    """
    if isinstance(tensor, Sharded):
        return tensor.span
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def present(tensor: Tensor, *, written: bool = False) -> AbstractContextManager[None]:
    """Context manager that fetches the values of a piece or a gradient; `written`: they are stored afterwards.

    >>> with present(torch.ones(2)):
    ...     pass
    """
    return fetched([tensor], written=[tensor] if written else ())


def splits_of(tensor: Tensor) -> bool:
    """Returns whether this is a piece of a model whose shards may be on the device as well as off it.

    >>> splits_of(torch.ones(2))
    False
    """
    shard = known_shard(tensor)
    return shard is not None and shard.sharding is not None and shard.sharding.splits


def is_divided(value: object) -> bool:
    """Returns whether a value is a DTensor or a `Sharded`.

    >>> is_divided(torch.ones(2))
    False
    """
    return isinstance(value, (DTensor, Sharded))


def is_placed(value: object) -> TypeGuard[DTensor]:
    """Whether something is a DTensor.

    >>> is_placed(torch.ones(2))
    False
    """
    return isinstance(value, DTensor)


def without_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor that shares the version counter of this one, and has no memory.

    >>> x = torch.ones(2)
    >>> one = without_memory(x); _ = x.add_(1); one.numel(), one._version == x._version
    (0, True)
    """
    counter = tensor.detach()
    none = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if isinstance(counter, DTensor):
        counter._local_tensor = none
        return counter
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(counter):
        counter.set_(none)  # type: ignore[call-overload]
    return counter


def is_replicated(tensor: Tensor, ranks: Sequence[int]) -> bool:
    """Returns whether a DTensor is replicated over these ranks, those of one dimension of its mesh.

    >>> is_replicated(torch.ones(2), [0])
    False
    """
    if not isinstance(tensor, DTensor):
        return False
    mesh, placements = tensor.device_mesh, tensor.placements
    dims = [dim for dim in range(mesh.ndim) if get_process_group_ranks(mesh.get_group(dim)) == list(ranks)]
    return any(placements[dim].is_replicate() for dim in dims)


def shown_as(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that wraps a local tensor as this tensor is wrapped; it keeps no memory of this one."""
    if not isinstance(tensor, DTensor):
        return lambda local: local
    spec = tensor._spec
    return lambda local: DTensor(local, spec, requires_grad=False)


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to. A DTensor and its local tensor count writes separately.

    >>> version_of(torch.ones(2).add_(1))
    1
    """
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


def take(here: Here, value: Tensor, what: str, *, own: bool = False) -> Tensor:
    """Returns this rank's elements, 1-D, of a full tensor or of one that is sharded alike.

    A view where that is possible, unless it is to `own` them.
    """
    if value.shape != here.shape:
        raise StateError(
            f"{what} has shape {tuple(value.shape)}, and {tuple(here.shape)} is needed, that of the whole parameter; "
            "this state belongs to another parameter"
        )
    placed = getattr(here, "placed", None)
    if not is_divided(value) or (placed is not None and placed.is_alike(value)):
        mine = here.cut(value)
        return mine.clone() if own and here.numel < value.numel() else mine
    there = here_of(value)
    if not there.alike(here):
        raise StateError(
            f"{what} holds {there}, and this rank's are {here}; it was kept on another rank, or divided "
            "in another way. Load whole tensors, or a checkpoint with zk.load, which divides it anew"
        )
    return value.span if isinstance(value, Sharded) else local_of(value).detach().reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Placed(Here):
    """This rank's elements of a DTensor, as its placements say; state is shown as a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    stride: tuple[int, ...]

    @staticmethod
    def by(tensor: DTensor, group: Any = None) -> Placed:
        """Returns this rank's elements of a DTensor."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        box, stride = (tuple(offsets), tuple(sizes)), tensor.stride()
        return Placed(tensor.shape, *box, 0, math.prod(sizes), group, mesh=mesh, placements=placements, stride=stride)

    def __str__(self) -> str:
        return f"what {self.placements} of {self.mesh} leaves here"

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the mesh that it is divided along."""
        return tuple(dim for dim, placement in enumerate(self.placements) if not placement.is_replicate())

    @property
    def misaligned(self) -> str:
        if not self.dims or self._blocks_per_rank is not None:
            return ""
        where = f"a shape of {tuple(self.shape)} under {self.placements} of {self.mesh}"
        return f"With {where}, not every rank begins with a block of {BLOCK}"

    @property
    def _blocks_per_rank(self) -> int | None:
        """Blocks on a rank that has its full share; None where some rank would begin within one."""
        axes = {getattr(self.placements[dim], "dim", 0) for dim in self.dims}
        axis = min(axes)
        if len(axes) > 1 or math.prod(self.shape[:axis]) != 1:  # not consecutive elements of the whole
            return None
        ranks = math.prod(self.mesh.size(dim) for dim in self.dims)
        rows, row = self.shape[axis], math.prod(self.shape[axis + 1 :])
        if len(self.dims) > 1 and rows % ranks:  # cut unevenly twice: no one share
            return None
        share = -(-rows // ranks) * row
        return blocks(share) if share % BLOCK == 0 or ranks == 1 or share >= rows * row else None

    def of(self, key: str) -> Here:
        """Scales are cut as their blocks are: as a DTensor where any can say that, else as a span."""
        if not key.endswith("_scale"):
            return self
        shape, first, numel = torch.Size([blocks(self.shape.numel())]), self.first // BLOCK, blocks(self.numel)
        placements = self._scale_placements(shape.numel())
        if placements is None:
            return Spanned(shape, (0,), tuple(shape), first, numel, self.group)
        box = (first,), (numel,)
        return Placed(shape, *box, 0, numel, self.group, mesh=self.mesh, placements=placements, stride=(1,))

    def _scale_placements(self, count: int) -> tuple[Any, ...] | None:
        if not self.dims:
            return self.placements
        ranks = math.prod(self.mesh.size(dim) for dim in self.dims)
        plain = all(type(self.placements[dim]) is Shard for dim in self.dims)
        if not plain or -(-count // ranks) != self._blocks_per_rank:
            return None
        return tuple(Shard(0) if dim in self.dims else Replicate() for dim in range(self.mesh.ndim))

    def alike(self, other: Here) -> bool:
        return isinstance(other, Placed) and (self.mesh, self.placements) == (other.mesh, other.placements)

    def is_alike(self, tensor: Tensor) -> bool:
        """Whether a tensor is a DTensor that is placed like this."""
        placed = isinstance(tensor, DTensor) and (tensor.device_mesh, tuple(tensor.placements))
        return placed == (self.mesh, self.placements)

    @property
    def copies(self) -> int:
        """How many ranks of the mesh have the same elements."""
        return math.prod(self.mesh.size(dim) for dim in range(self.mesh.ndim) if dim not in self.dims)

    def local(self, tensor: DTensor) -> Tensor:
        """This rank's part of a DTensor; one that is placed in another way comes here first, on all ranks of the mesh.

        A gradient may be a sum of which each rank has a term (`Partial`), or whole on each.
        """
        with torch.no_grad():
            alike = tensor if self.is_alike(tensor) else tensor.redistribute(self.mesh, self.placements)
        found = alike._local_tensor
        return found.trigger_wait() if isinstance(found, AsyncCollectiveTensor) else found

    def cut(self, whole: Tensor) -> Tensor:
        """As everywhere; of a DTensor, what is here of it once it is placed like this."""
        if not isinstance(whole, DTensor):
            return super().cut(whole)
        return self.local(whole).detach().reshape(-1)[self.start : self.start + self.numel]

    def show(self, local: Tensor, before: Any = None, name: str = "") -> Tensor:
        if isinstance(before, DTensor) and _holds(before, local) and before.placements == self.placements:
            return before
        with torch.no_grad():
            return over(local.detach().view(self.sizes), self.mesh, self.placements, self.shape, self.stride)


def _holds(shown: DTensor, value: Tensor) -> bool:
    local = shown._local_tensor
    same = local.numel() == value.numel() and local.dtype == value.dtype and local.device == value.device
    return same and local.data_ptr() == value.data_ptr()


def over(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """Makes a DTensor over that very memory, wherever it is: `from_local` would move it to the mesh's device."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), local.dtype))
    return DTensor(local.view_as(local), spec, requires_grad=False)


def shardings_of(shards: Iterable[Any]) -> list[Any]:
    """Returns the `Sharding`s of these shards, each once; None is left out.

    >>> shardings_of([None])
    []
    """
    found = [shard.sharding for shard in shards if shard is not None]
    return list({id(one): one for one in found if one is not None}.values())


class _Slotted(Tensor):
    """An object with the slots of a DTensor: only such can take each other's place."""

    __slots__ = SLOTS


class ShardedDTensor(Sharded, _Slotted):
    """Stands for a DTensor parameter between its uses at stage 3."""


def largest_local_numel(tensor: Tensor) -> int:
    """Returns the number of elements on the rank that has most of them.

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
