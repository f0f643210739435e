"""Divides what an update changes into parts, which are fetched, stepped and stored one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.zero.shard import Shard

__all__ = ["Part", "needed_first", "parts_of"]

LEAST_NBYTES = 8 << 20  # of parameters: copies of less do not reach the link's rate


class Part(NamedTuple):
    """Names what of an update is fetched, stepped and stored together: a bucket of zk.shard, or plain parameters.

    `members`: places among an optimizer's parameters. `sharding`, `bucket`: which of its buckets this is.
    """

    name: str
    members: Sequence[int]
    sharding: Any = None
    bucket: int = -1


def parts_of(pieces: Sequence[Tensor], homes: Sequence[Shard]) -> list[Part]:
    """Returns the parts in the order in which forwards need them: plain parameters in theirs, then buckets in theirs.

    >>> import torch
    >>> from zerokern.zero.shard import shards_of
    >>> some = [torch.empty(3 << 20), torch.ones(1), torch.ones(2)]
    >>> [part.members for part in parts_of(some, shards_of(some, "abc"))]
    [(0,), (1, 2)]
    """
    parts: list[Part] = []
    members: list[int] = []
    nbytes = 0
    buckets: dict[tuple[int, int], list[int]] = {}
    shardings: dict[int, Any] = {}
    for place, (piece, home) in enumerate(zip(pieces, homes, strict=True)):
        if home.sharding is not None and home.sharding.publisher is not None:
            if home.gradients is not None:
                shardings[id(home.sharding)] = home.sharding
                buckets.setdefault((id(home.sharding), home.gradients.number), []).append(place)
            continue
        members.append(place)
        nbytes += piece.nbytes
        if nbytes >= LEAST_NBYTES:
            parts.append(Part(f"parameters {members[0]} to {members[-1]}", tuple(members)))
            members, nbytes = [], 0
    if members:
        parts.append(Part(f"parameters {members[0]} to {members[-1]}", tuple(members)))
    for number, sharding in enumerate(shardings.values()):
        prefix = f"model {number} " if len(shardings) > 1 else ""
        for bucket in sorted(key[1] for key in buckets if key[0] == id(sharding)):
            name = f"{prefix}bucket {bucket}"
            parts.append(Part(name, tuple(buckets[id(sharding), bucket]), sharding, bucket))
    return parts


def needed_first(pieces: Sequence[Tensor], homes: Sequence[Shard]) -> list[int]:
    """Returns the places of all pieces in the order in which forwards need them.

    Gradients come in the opposite order. So what stands first here has the least time between its gradient and its use.

    >>> import torch
    >>> from zerokern.zero.shard import shards_of
    >>> some = [torch.empty(3 << 20), torch.ones(1), torch.ones(2)]
    >>> needed_first(some, shards_of(some, "abc"))
    [0, 1, 2]
    """
    found = [place for part in parts_of(pieces, homes) for place in part.members]
    return found + sorted(set(range(len(pieces))).difference(found))
