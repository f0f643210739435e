"""Divides what an update changes into parts, which are fetched, stepped and stored one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zerokern.core.units import BLOCK, Piece
from zerokern.schedule import program
from zerokern.schedule.program import names_of_pieces
from zerokern.zero.shard import Shard

__all__ = ["Part", "in_order", "in_pieces", "needed_first", "part_of", "parts_of"]

LEAST_NBYTES = 8 << 20  # of parameters: copies of less do not reach the link's rate


class Part(NamedTuple):
    """Names what of an update is fetched, stepped and stored together: a bucket of zk.shard, or plain parameters.

    `members`: places among an optimizer's parameters. `sharding`, `bucket`: whose gradients these are, and which
    bucket of them, or None. `pieces`: what of it is moved and stepped one after the other, if not all of it at once:
    segments of these members, each a row of its own in the table of an update. `turns`: what is updated one after the
    other, pieces or all members; `names`: of these in a step program.
    """

    name: str
    members: Sequence[int]
    sharding: Any
    bucket: Any
    pieces: Sequence[Sequence[Piece]]
    turns: Sequence[Sequence[int | Piece]]
    names: Sequence[str]


def part_of(
    name: str,
    members: Sequence[int],
    sharding: Any = None,
    bucket: Any = None,
    pieces: Sequence[Sequence[Piece]] = (),
) -> Part:
    """Returns a part, with what is said of it by its pieces.

    >>> part_of("parameters 0 to 1", (0, 1)).names
    ['parameters 0 to 1']
    """
    turns = pieces or (members,)
    return Part(name, members, sharding, bucket, pieces, turns, names_of_pieces(name, len(turns)))


def in_pieces(part: Part, tensors: Sequence[Tensor], moved: Sequence[int]) -> Part:
    """Returns the part with pieces of one size, if more than `PIECE_NBYTES` of its parameters cross the link.

    `tensors`: by place among an optimizer's parameters. `moved`: members that cross it.

    >>> import torch
    >>> large = torch.empty(64 << 20, dtype=torch.bfloat16, device="meta")
    >>> whole = part_of("parameters 0 to 0", (0,))
    >>> [(one.param, one.start, one.numel) for piece in in_pieces(whole, [large], [0]).pieces for one in piece]
    [(0, 0, 33554432), (0, 33554432, 33554432)]
    """
    nbytes = sum(tensors[member].nbytes for member in moved)
    count = -(-nbytes // program.PIECE_NBYTES)
    if count <= 1:
        return part
    pieces: list[list[Piece]] = [[]]
    taken = 0
    for member in moved:
        start, each = 0, tensors[member].itemsize
        while start < tensors[member].numel():
            left = nbytes * len(pieces) // count - taken
            if left <= 0:
                pieces.append([])
                continue
            numel = min(tensors[member].numel() - start, -(-left // each // BLOCK) * BLOCK)
            pieces[-1].append(Piece(member, start, numel, 0))
            start, taken = start + numel, taken + numel * each
    return part_of(part.name, part.members, part.sharding, part.bucket, tuple(map(tuple, pieces)))


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
            parts.append(part_of(f"parameters {members[0]} to {members[-1]}", tuple(members)))
            members, nbytes = [], 0
    if members:
        parts.append(part_of(f"parameters {members[0]} to {members[-1]}", tuple(members)))
    for number, sharding in enumerate(shardings.values()):
        prefix = f"model {number} " if len(shardings) > 1 else ""
        for bucket in sorted(key[1] for key in buckets if key[0] == id(sharding)):
            name = f"{prefix}bucket {bucket}"
            members = buckets[id(sharding), bucket]
            parts.append(part_of(name, tuple(members), sharding, sharding.gradient_buckets[bucket]))
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


def in_order(tickets: Sequence[Any], *, at_once: bool) -> list[Any]:
    """Returns a ticket for each piece, if there is any: where a piece has nothing to wait for, the one before it.

    `at_once`: whoever measures the first one reads all of them. They are of one stream, so the last ends last.

    >>> in_order([None, "a", None, "b"], at_once=False), in_order(["a", "b"], at_once=True)
    (['a', 'a', 'a', 'b'], ['b', 'b'])
    """
    known = [ticket for ticket in tickets if ticket is not None]
    if not known:
        return []
    last, found = known[0], []
    for ticket in tickets:
        last = last if ticket is None else ticket
        found.append(last)
    return [last] * len(found) if at_once else found
