"""Tensors of which a rank holds a part, as torch.distributed.checkpoint asks for them: boxes, and views of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerokern.core.errors import StateError
from zerokern.memory.here import Cuboid, boxes

if TYPE_CHECKING:
    from zerokern.zero.sharded import Sharded

__all__ = ["chunk_list", "held", "part_of", "write_items"]


def write_items(fqn: str, shape: torch.Size, dtype: torch.dtype, cuboids: Sequence[Cuboid]) -> list[Any]:
    """What is to be written for these boxes of a tensor.

    >>> [item.index.offset for item in write_items("w", torch.Size([3, 4]), torch.float32, boxes((3, 4), 2, 6))]
    [torch.Size([0, 2]), torch.Size([1, 0])]
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in chunk_list(cuboids)
    ]


def chunk_list(cuboids: Sequence[Cuboid]) -> list[Any]:
    """The boxes as torch spells them.

    >>> chunk_list(boxes((3, 4), 4, 8))
    [ChunkStorageMetadata(offsets=torch.Size([1, 0]), sizes=torch.Size([2, 4]))]
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(sizes)) for at, sizes, _ in cuboids]


def held(tensor: Sharded) -> list[Cuboid]:
    """The boxes that are here. A tensor without elements is everywhere: somebody has to say that it exists."""
    if not tensor.numel():
        return [((0,) * tensor.ndim, tuple(tensor.shape), 0)]
    return boxes(tensor.shape, tensor.start, tensor.span.numel())


def part_of(tensor: Sharded, offsets: Sequence[int] | None) -> Tensor:
    """The box that begins there, a view of what is held."""
    for at, sizes, first in held(tensor):
        if offsets is None or at == tuple(offsets):
            flat = tensor.local.detach()[first : first + torch.Size(sizes).numel()]
            return flat.view(sizes)
    raise StateError(f"{tensor!r} has no box that begins at {offsets}: what was planned was another tensor")
