"""How the parameters of a model map to the tensors of a checkpoint: one to one, unless a plug says otherwise.

A plug of the port "checkpoint layout" (tiled Linears, in zerokern/activations) says which parameters are saved as parts
of a larger tensor. The checkpoint holds only that tensor, so models without tiles can load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from zerokern.checkpoint.source import Source

__all__ = ["PartOf", "SavedLayout", "index_of", "merge_parts"]


@dataclass(frozen=True)
class PartOf:
    """The place of a saved item within a larger tensor: rows from `first` on of the tensor with this key and shape."""

    key: str
    first: int
    shape: torch.Size

    def moved(self, offsets: Sequence[int]) -> torch.Size:
        """Converts offsets within the item to offsets within the larger tensor."""
        return torch.Size((offsets[0] + self.first, *offsets[1:])) if offsets else torch.Size()


class SavedLayout:
    """Maps parameters to the tensors of a checkpoint. In this default each parameter is a tensor of its own name.

    >>> SavedLayout().place("weight", torch.Size([2, 3]))
    ('weight', torch.Size([2, 3]), 0)
    """

    def place(self, name: str, shape: torch.Size) -> tuple[str, torch.Size, int]:
        """Returns the name and shape of the saved tensor that holds a parameter, and the number of its first element
        there."""
        return name, shape, 0

    def saved_names(self, names: Iterable[str]) -> list[str]:
        """Returns the names of the saved tensors that hold these parameters, each once."""
        return list(dict.fromkeys(self.place(name, torch.Size())[0] for name in names))

    def saved_order(self, names: Iterable[str]) -> list[str]:
        """Returns `saved_names` in the order in which a model without parts registers them."""
        return self.saved_names(names)

    def items_to_save(self, items: dict[str, Any]) -> tuple[dict[str, Any], dict[str, PartOf]]:
        """Returns the items to save by key, and the places of those that are parts of larger tensors."""
        return items, {}

    def source(self, source: Source) -> Source:
        """Returns a checkpoint as this model sees it: with one tensor for each parameter."""
        return source


def merge_parts(
    metadata: Mapping[str, TensorStorageMetadata], within: Mapping[str, PartOf]
) -> dict[str, TensorStorageMetadata]:
    """Returns torch's description of the saved tensors, in which parts have become boxes of the larger tensors."""
    made: dict[str, TensorStorageMetadata] = {}
    for key, described in metadata.items():
        place = within.get(key)
        if place is None:
            made[key] = described
            continue
        there = made.setdefault(place.key, replace(described, size=place.shape, chunks=[]))
        there.chunks += [ChunkStorageMetadata(place.moved(chunk.offsets), chunk.sizes) for chunk in described.chunks]
    return made


def index_of(index: MetadataIndex, within: Mapping[str, PartOf]) -> MetadataIndex:
    """Returns the index of a box within the tensor that it is saved in."""
    place = within.get(index.fqn)
    if place is None:
        return index
    return MetadataIndex(place.key, place.moved(index.offset or (0,) * len(place.shape)))
