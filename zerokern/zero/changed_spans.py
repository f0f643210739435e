"""Publishes an updated bucket as what has changed of it, where that is less than all of it (`publish="delta"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zerokern.comm import Handle
from zerokern.kernels.changed import Packed, pack_changed, unpack_changed
from zerokern.kernels.formats import blocks
from zerokern.zero.params import BucketMemory
from zerokern.zero.partition import Piece
from zerokern.zero.shard import Shard
from zerokern.zero.watch import Watch

__all__ = ["ChangedSpan", "Send", "Take"]

_HEAD = torch.int64.itemsize  # of what a rank sends: how many bytes its changes take, or that it needs all
_SIZES = 2 * torch.int32.itemsize  # of each piece: the bytes of its places and values
_NEEDS_ALL = -1
_MOST = 0.75  # of the bytes of a span: where changes take more, packing costs more than it saves
_PAUSE = 8  # publications, of which the last alone asks how many bytes there are, where the last ones took more
Send = Callable[[Tensor], Handle]
Take = Callable[[Tensor], Tensor]


class ChangedSpan:
    """Sends of this rank's span of one bucket the elements whose bits have changed; all ranks send as many bytes.

    How many that are follows from what all ranks needed last time, which each has seen, so nobody has to meet for it.
    Where some rank needs more, or all, everybody sees that in what was sent, and sends the whole span after it.
    """

    def __init__(self, memory: BucketMemory, shards: Sequence[Shard]) -> None:
        """`shards`: of the bucket's parameters, in their order."""
        self._memory = memory
        bucket, group = memory.bucket, memory.group
        self._pieces = [bucket.pieces(rank) for rank in range(group.size)]
        of = {place.param: shard for place, shard in zip(bucket.places, shards, strict=True)}
        self._shards = [of[piece.param] for piece in self._pieces[group.rank]]
        self._watch = Watch((entry.param for entry in memory.entries), memory=False)
        self._most = int(_MOST * bucket.shard_numel * memory.dtype.itemsize)
        self._room = self._most
        self._paused = 0
        self._needs_all = False

    def look(self, *, written: bool = False) -> None:
        """Notes what others than updates have written; who counts updates as writes calls it before, then `accept`.

        All spans are sent whole then: the program may have written here alone.
        """
        self._needs_all = bool(self._watch.written(accept=True)) or written or self._needs_all

    def accept(self) -> None:
        """Takes the parameters as they are for published."""
        self._watch.accept_writes()

    def gather(self, send: Send, take: Take | None) -> Handle:
        """Starts to send.

        `send`: gathers the spans of all ranks into a flat tensor. `take`: gives up the bits of what has changed of a
        piece since it last did; None: nobody knows.
        """
        bits = [] if take is None else [take(shard.piece) for shard in self._shards]
        needs_all, self._needs_all = self._needs_all or take is None, False
        if self._paused:
            self._paused -= 1
            return send(self._memory.full)
        group, packed = self._memory.group, []
        wire = torch.empty(group.size, _HEAD + self._room, dtype=torch.uint8)
        need = _NEEDS_ALL
        if not needs_all:
            packed = [self._pack(*one) for one in zip(bits, self._pieces[group.rank], strict=True)]
            need = sum(_SIZES + one.nbytes for one in packed)
        mine = wire[group.rank]
        mine[:_HEAD].view(torch.int64).fill_(need)
        if 0 < need <= self._room:
            sizes = torch.tensor([(one.places.nbytes, one.values.nbytes) for one in packed], dtype=torch.int32)
            parts = [part.view(torch.uint8) for one in packed for part in (one.counts, one.places, one.values)]
            torch.cat([sizes.view(torch.uint8).view(-1), *parts], out=mine[_HEAD : _HEAD + need])
        handle = send(wire)
        return Handle(partial(self._complete, wire, handle, send))

    def _pack(self, bits: Tensor, piece: Piece) -> Packed:
        return pack_changed(bits, self._memory.own[piece.offset : piece.offset + piece.numel])

    def _complete(self, wire: Tensor, handle: Handle, send: Send) -> None:
        handle.wait()
        group = self._memory.group
        needs = wire[:, :_HEAD].contiguous().view(torch.int64).view(-1).tolist()
        if min(needs) == _NEEDS_ALL or max(needs) > self._room:
            send(self._memory.full).wait()
        else:
            for rank, need in enumerate(needs):
                if rank != group.rank:
                    self._unpack(rank, wire[rank, _HEAD : _HEAD + need])
        if max(needs) > self._most:
            self._paused, self._room = _PAUSE - 1, 0
        elif max(needs) >= 0:
            self._room = min(self._most, -(-(max(needs) * 5 // 4 + 512) // 64) * 64)

    def _unpack(self, rank: int, sent: Tensor) -> None:
        begin, pieces, full = rank * self._memory.bucket.shard_numel, self._pieces[rank], self._memory.full.data
        head = _SIZES * len(pieces)
        sizes = sent[:head].clone().view(torch.int32).view(-1, 2).tolist()
        lengths = [length for piece, one in zip(pieces, sizes, strict=True) for length in (blocks(piece.numel), *one)]
        parts = iter(sent[head:].split(lengths))
        for piece, counts, places, values in zip(pieces, parts, parts, parts, strict=True):
            packed = Packed(piece.numel, counts, places, values.clone().view(self._memory.dtype))  # aligned
            unpack_changed(packed, full[begin + piece.offset :][: piece.numel])
