"""Groups of ranks on CPUs: gloo, with spans exchanged point to point, straight from and into the buckets.

gloo's own reduce-scatter and all-gather copy through buffers of their own and take four times as long. Sums run in
fp32, in the order of the ranks, in one pass of the native accumulate.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import collectives
from zerokern.comm.common import Common, CommonGroup, detail
from zerokern.comm.group import FLOATS, Handle, own_span
from zerokern.comm.operations import Operation
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares

__all__ = ["PeerGroup"]

KINDS = {"reduce_scatter": 0, "all_gather": 1, "all_reduce": 2, "broadcast": 3, "publish": 4, "all_to_all": 5}
WHOLE_NBYTES = 1 << 15  # a smaller tensor goes to everyone whole: one round trip instead of two
CELL_NBYTES = 64  # a number or two, behind what tells them apart, go through gloo's all-gather: where other processes
HEAD_NBYTES = 16  # want the same cores, that takes 0.1 ms and point to point a slice of the scheduler for each way
COUNTS = 1 << 10  # numbers in a tag; a later round with the same number comes after the earlier one, as posted
Transfers = list[tuple[int, Tensor]]


class PeerGroup(CommonGroup):
    """A group over gloo."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(pg, common, device, name)
        # keeps memory alive that gloo reads or writes, even if nobody waits
        self._pending: dict[int, tuple[Tensor, ...]] = {}
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def awaiting_update(self) -> AbstractContextManager[None]:
        return self._common.observer.awaiting_update()

    def _start(
        self, kind: str, detail: str, sends: Transfers, receives: Transfers, source: int | None = None
    ) -> tuple[Operation, list[Any]]:
        operation = self._common.ledger.begin(kind, detail, source)
        return operation, self._post(operation, sends, receives)

    def _post(self, operation: Operation, sends: Transfers, receives: Transfers) -> list[Any]:
        observer = self._common.observer
        observer.check(operation)
        # sizes are part of the tag: where ranks differ, nothing arrives, and the observer finds out why
        tag = (
            KINDS[operation.kind] << 27
            | (operation.count % COUNTS) << 17
            | zlib.crc32(operation.detail.encode()) & 0x1FFFF
        )
        try:
            return collectives.post(self._pg, sends, receives, tag)
        except RuntimeError as error:
            raise observer.failed(operation, error) from error

    def _handle(
        self, operation: Operation, works: list[Any], finish: Callable[[], None], *memory: Tensor | None
    ) -> Handle:
        self._pending[id(operation)] = tuple(tensor for tensor in memory if tensor is not None)

        def complete() -> None:
            nonlocal finish
            self._wait(operation, works)
            self._pending.pop(id(operation), None)
            once, finish = finish, _nothing  # who waits again after Ctrl-C does not add up once more
            once()

        return Handle(complete)

    def _wait(self, operation: Operation, works: list[Any]) -> None:
        with self._common.observer.waiting(operation):
            for work in works:
                work.wait()

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        span = out.numel()
        if scratch is None:
            scratch = torch.empty((self.size - 1) * span, dtype=bucket.dtype)
        arrived = {peer: scratch[i * span : (i + 1) * span] for i, peer in enumerate(self._peers)}
        sends = [(peer, own_span(bucket, peer, self.size)) for peer in self._peers]
        operation, works = self._start("reduce_scatter", detail(bucket), sends, list(arrived.items()))
        sources = [arrived[r] if r != self.rank else own_span(bucket, r, self.size) for r in range(self.size)]

        def finish() -> None:
            if span:
                add_up(out, sources, add=add, scale=scale, squares=squares)

        return self._handle(operation, works, finish, bucket, scratch, out)

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        mine = own_span(full, self.rank, self.size)
        if shard is not None:
            mine.copy_(shard)
        operation, works = self._start("all_gather", detail(full), *self._spread(full))
        return self._handle(operation, works, _nothing, full)

    def _publish(self, full: Tensor) -> Handle:
        operation, works = self._start("publish", detail(full), *self._spread(full))
        return self._handle(operation, works, _nothing, full)

    def _all_to_all(self, receives: list[Tensor], sends: list[Tensor]) -> Handle:
        # sizes may differ from rank to rank, so that they cannot be part of what all ranks call this alike
        what = str(receives[self.rank].dtype)
        there = [(peer, sends[peer]) for peer in self._peers]
        here = [(peer, receives[peer]) for peer in self._peers]
        operation, works = self._start("all_to_all", what, there, here)
        return self._handle(operation, works, _nothing, *sends, *receives)

    def _spread(self, full: Tensor) -> tuple[Transfers, Transfers]:
        """Returns the transfers of an all-gather: this rank's span to every peer, every peer's span to its place."""
        spans = _spans(full, self.size)
        return [(peer, spans[self.rank]) for peer in self._peers], [(peer, spans[peer]) for peer in self._peers]

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        if tensor.numel() * tensor.element_size() <= CELL_NBYTES - HEAD_NBYTES:
            return self._all_reduce_cell(tensor, op)
        whole = tensor.numel() * tensor.element_size() <= WHOLE_NBYTES  # it goes to everyone, and there is one round
        spans = [tensor] * self.size if whole else _spans(tensor, self.size)
        span, peers = spans[self.rank].numel(), self.size - 1
        if scratch is None or whole:
            scratch = torch.empty(peers * span, dtype=tensor.dtype)
        scratch = scratch[: peers * span]
        arrived = dict(zip(self._peers, scratch.view(peers, span), strict=True))
        sends = [(peer, spans[peer]) for peer in self._peers]
        operation, works = self._start("all_reduce", f"{op} of {detail(tensor)}", sends, list(arrived.items()))

        def finish() -> None:
            _combine(spans[self.rank], {**arrived, self.rank: spans[self.rank]}, op)
            if not whole:
                second = self._common.ledger.again(operation)
                self._wait(second, self._post(second, *self._spread(tensor)))

        return self._handle(operation, works, finish, tensor, scratch)

    def _all_reduce_cell(self, tensor: Tensor, op: str) -> Handle:
        operation = self._common.ledger.begin("all_reduce", f"{op} of {detail(tensor)}")
        observer = self._common.observer
        observer.check(operation)
        cells = torch.zeros(self.size * CELL_NBYTES, dtype=torch.uint8)
        head = torch.tensor([operation.count, zlib.crc32(operation.detail.encode())])
        mine = torch.cat([head.view(torch.uint8), tensor.view(torch.uint8)])
        own_span(cells, self.rank, self.size)[: mine.numel()] = mine
        try:
            work = collectives.all_gather(self._pg, cells, own_span(cells, self.rank, self.size).clone())
        except RuntimeError as error:
            raise observer.failed(operation, error) from error

        def finish() -> None:
            rows = cells.view(self.size, CELL_NBYTES)
            heads = rows[:, :HEAD_NBYTES]
            if any(not torch.equal(head, heads[self.rank]) for head in heads):
                raise observer.unlike(operation)
            parts = rows[:, HEAD_NBYTES : mine.numel()].contiguous().view(tensor.dtype)
            _combine(tensor, dict(enumerate(parts)), op)

        return self._handle(operation, [work], finish, tensor, cells)

    def _all_reduce_nbytes(self, tensor: Tensor) -> int:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes <= CELL_NBYTES - HEAD_NBYTES:
            return (self.size - 1) * CELL_NBYTES
        if nbytes <= WHOLE_NBYTES:
            return (self.size - 1) * nbytes
        mine = _spans(tensor, self.size)[self.rank].numel()
        return (tensor.numel() - mine + (self.size - 1) * mine) * tensor.element_size()

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        sends = [(peer, tensor) for peer in self._peers] if self.rank == src else []
        receives = [(src, tensor)] if self.rank != src else []
        operation, works = self._start("broadcast", f"{detail(tensor)} from rank {src}", sends, receives, src)
        return self._handle(operation, works, _nothing, tensor)


def _spans(tensor: Tensor, size: int) -> list[Tensor]:
    """Returns a span for each rank, of equal sizes except for the last ones."""
    each = -(-tensor.numel() // size)
    return [tensor[rank * each : (rank + 1) * each] for rank in range(size)]


def _combine(target: Tensor, sources: dict[int, Tensor], op: str) -> None:
    """Writes the sum or maximum of the sources into `target`, in the order of the ranks; `target`
    may be one of them."""
    ordered = [sources[rank] for rank in sorted(sources)]
    if not target.numel():
        return
    if op == "sum" and target.dtype in FLOATS:
        add_up(target, ordered, add=False)
        return
    total = ordered[0].clone()
    for source in ordered[1:]:
        if op == "sum":
            total += source
        else:
            torch.maximum(total, source, out=total)
    target.copy_(total)


def _nothing() -> None:
    pass
