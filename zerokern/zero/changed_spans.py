"""Publishes an updated bucket as what has changed of it, where that is less than all of it (`publish="delta"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import torch
from torch import Tensor

from zerokern.comm import Handle
from zerokern.core.errors import StateError
from zerokern.kernels.changed import MOST, Packed, Pause, add_bits, pack_changed, unpack_changed
from zerokern.kernels.ops import fingerprints
from zerokern.zero.params import BucketMemory
from zerokern.zero.shard import Shard
from zerokern.zero.watch import WriteLog

__all__ = ["ChangedSpan", "Send", "Take"]

_HEAD = 3 * torch.int64.itemsize  # of what a rank sends: the bytes of its changes, and of their places; a print
_NEEDS_ALL = -1
COMPARED_EACH = 128  # publications of a bucket: a print takes a third longer than to unpack what others have changed
_DIFFER = (
    "ranks have other values of parameters from {name!r} on since one of the last {each} updates: {ranks} differ. With "
    "publish='delta' a write that no version counts (`.data`, NumPy, a pointer) reaches no other rank. Call "
    "opt.refresh_masters() on all ranks after such a write, or write within torch.no_grad(); now load the model, then "
    "its optimizer"
)
Send = Callable[[Tensor], Handle]
Take = Callable[..., Tensor | None]
"""Gives up the bits of what has changed of a tensor, or of these elements of it; None: none has."""


class ChangedSpan:
    """Sends of this rank's span of one bucket the elements whose bits have changed; all ranks send as many bytes.

    How many that are follows from what all ranks needed last time, which each has seen, so nobody has to meet for it.
    Where some rank needs more, everybody sees that in what was sent. As many bytes as that one needs, or whole spans,
    are sent after it.
    """

    def __init__(self, memory: BucketMemory, shards: Sequence[Shard]) -> None:
        """`shards`: of the bucket's parameters, in their order."""
        self._memory = memory
        bucket = memory.bucket
        of = {place.param: shard for place, shard in zip(bucket.places, shards, strict=True)}
        self._pieces = [(one.offset, of[one.param].piece) for one in bucket.pieces(memory.group.rank)]
        self._pairs = [(entry.param, shard) for entry, shard in zip(memory.entries, shards, strict=True)]
        watched = [*(param for param, _ in self._pairs), *(piece for _, piece in self._pieces)]
        # what others than updates write may be here alone: all is sent then
        self.writes = WriteLog(watched, memory=False)
        self._most = int(MOST * bucket.shard_numel * memory.dtype.itemsize) // 8 * 8  # so that what is sent is aligned
        self._room, self._pause = 0, Pause()
        self._count = 0
        self._is_of_one = False  # whether one optimizer updates all that is trained of it
        self._print = 0  # of all values after one of the last publications, until ranks have compared theirs

    def note_updated(self, pieces: AbstractSet[int]) -> None:
        """Notes what an optimizer updates: pieces, by their ids.

        Where several update the bucket, ranks compare nothing: one may write while another's print is taken.
        """
        self._is_of_one = all(id(shard.piece) in pieces for param, shard in self._pairs if param.requires_grad)

    def gather(self, send: Send, take: Take | None) -> Handle:
        """Starts to send.

        `send`: gathers the spans of all ranks into a flat tensor. `take`: gives up the bits of what has changed of a
        piece since it last did; None: nobody knows.
        """
        mask = self._memory.own.new_zeros(-(-self._memory.bucket.shard_numel // 8), dtype=torch.uint8)
        for offset, piece in self._pieces:
            bits = None if take is None else take(piece)
            if bits is not None:
                add_bits(mask, offset, bits)
        needs_all = take is None or bool(self.writes.places)
        self.writes.places.clear()
        packs = self._pause.is_over()
        if needs_all or not packs:
            self._print = 0  # of values that are replaced: what differed does so no more
        if not packs:
            return send(self._memory.full)
        packed = None if needs_all else pack_changed(mask, self._memory.own)
        wire = self._wire(packed, self._room)
        return Handle(partial(self._complete, wire, packed, [(wire, send(wire))], send))

    def _wire(self, packed: Packed | None, room: int) -> Tensor:
        """Returns memory for what all ranks send, of which this rank's part is filled in as far as there is room."""
        wire = self._memory.own.new_empty((self._memory.group.size, _HEAD + room), dtype=torch.uint8)
        mine = wire[self._memory.group.rank]
        need, nplaces = (_NEEDS_ALL, 0) if packed is None else (packed.nbytes, packed.places.numel())
        mine[:_HEAD].view(torch.int64).copy_(torch.tensor([need, nplaces, self._print], device="cpu"))
        if packed is not None and need <= room:
            packed.write(mine[_HEAD : _HEAD + need])
        return wire

    def _complete(self, wire: Tensor, packed: Packed | None, sent: list[tuple[Tensor, Handle]], send: Send) -> None:
        """`sent`: what is under way; a second call, after a Ctrl-C, sends nothing again."""
        sent[0][1].wait()
        needs, places, prints = wire[:, :_HEAD].contiguous().view(torch.int64).t().tolist()
        most, full = max(needs), self._memory.full
        if most > self._room or min(needs) == _NEEDS_ALL:
            if len(sent) == 1:
                whole = most > self._most or min(needs) == _NEEDS_ALL
                wire = full if whole else self._wire(packed, _rounded(most))
                sent.append((wire, send(wire)))
            wire = sent[1][0]
            sent[1][1].wait()
        if wire is not full:
            for rank, span in enumerate(full.data.view(len(needs), -1)):
                if rank != self._memory.group.rank:
                    changes = wire[rank, _HEAD : _HEAD + needs[rank]]
                    unpack_changed(Packed.read(changes, span.numel(), span.dtype, places[rank]), span)
        if most > self._most:
            self._pause.begin()
            self._room = 0
        elif most >= 0:
            self._room = min(self._most, _rounded(most * 5 // 4 + 512))
        self._compare(prints)

    def _compare(self, prints: list[int]) -> None:
        """Raises on all ranks where they had other values; takes the print that they compare in the next publication.

        What a program writes afterwards is not in it. 0: a rank has none.
        """
        self._print = 0  # also where they differ: what is loaded then is compared anew
        of_ranks = {rank: one for rank, one in enumerate(prints) if one}
        if len({*of_ranks.values()}) > 1:
            first, *others = of_ranks
            others = [rank for rank in others if of_ranks[rank] != of_ranks[first]]
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} and rank {first}"
            raise StateError(_DIFFER.format(name=self._memory.entries[0].name, each=COMPARED_EACH, ranks=ranks))
        self._count += 1
        is_due = (self._count + self._memory.bucket.index) % COMPARED_EACH == 0  # so that buckets take turns
        if is_due and self._is_of_one:
            self._print = int(fingerprints([self._memory.full.data]))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
