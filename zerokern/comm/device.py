"""Groups of ranks on devices: NCCL, one launch per collective, in place where the request allows it.

Gathers and broadcasts run on the program's communicator, all that a step reduces or publishes on a second one. On each
of them the order is the same on all ranks. Between the two it is as long as one thread launches and the ranks compute
the same graph; what may differ are publications, which an update's worker launches, and reductions of ranks that leave
a parameter out. Those end in any order where no two streams share a queue (`joining` warns), and because a collective
of each communicator fits on a GPU at once: NCCL takes at most 32 of its multiprocessors for one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import collectives
from zerokern.comm.common import Common, CommonGroup, detail
from zerokern.comm.group import Handle, own_span
from zerokern.kernels.casts import add_up
from zerokern.kernels.squares import Squares
from zerokern.kernels.triton.backend import beside_captures
from zerokern.memory.staging import stream_gate

__all__ = ["DeviceGroup"]


class DeviceGroup(CommonGroup):
    """A group over a device's collective library."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(pg, common, device, name)
        self.alone = False  # a test makes one of a single rank, so that the library runs on one GPU
        if common.lane is None:
            common.lane = collectives.second_communicator(pg)

    def _launch(
        self, kind: str, detail: str, launch: Callable[[], Any], finish: Callable[[], None] | None, *memory: Tensor
    ) -> Handle:
        observer = self._common.observer
        operation = self._common.ledger.begin(kind, detail)
        observer.check(operation)
        try:
            work = launch()
        except RuntimeError as error:
            raise observer.failed(operation, error) from error
        observer.launched(operation)
        gate: Callable[[], None] = work.wait

        def ended() -> bool:
            with beside_captures():  # it asks events, which would break off the capture of another thread
                return bool(work.is_completed())

        def complete() -> None:
            nonlocal gate
            with observer.waiting(operation):
                work.wait()
            if finish is not None:
                finish()
                gate = stream_gate(self.device)
            held.clear()

        held = list(memory)  # kept until the current stream waits for the work that uses it
        return Handle(complete, ended if finish is None else None, lambda: gate())

    def _reduce_scatter(
        self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None, squares: Squares | None
    ) -> Handle:
        straight = not add and out.dtype == bucket.dtype
        op = "sum"
        if scale == 1.0 / self.size and self.averages(bucket):
            op, scale = "mean", 1.0
        elif bucket.dtype == torch.float16 and abs(scale) < 1 and bucket.numel():
            # the library sums in fp16, whose largest number a sum of scaled losses reaches long before their mean does
            add_up(bucket, [bucket], add=False, scale=scale)
            scale = 1.0
        if straight:
            total = out
        elif scratch is not None and scratch.numel() >= out.numel():
            total = scratch[: out.numel()]
        else:
            total = own_span(bucket, self.rank, self.size)

        def finish() -> None:
            if out.numel() and not (straight and scale == 1.0):
                add_up(out, [total], add=add, scale=scale)

        return self._launch(
            "reduce_scatter",
            detail(bucket),
            partial(collectives.reduce_scatter, self._common.lane, total, bucket, op),
            None if straight and scale == 1.0 else finish,
            bucket,
            out,
            total,
        )

    def averages(self, tensor: Tensor) -> bool:
        """Returns whether NCCL's mean is exact: it multiplies by 1 / size, rounded to the tensor's dtype, before it
        sums."""
        return tensor.dtype == torch.float32 or self.size & (self.size - 1) == 0

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        source = own_span(full, self.rank, self.size) if shard is None else shard
        return self._launch(
            "all_gather", detail(full), partial(collectives.all_gather, self._pg, full, source), None, full, source
        )

    def _publish(self, full: Tensor) -> Handle:
        source = own_span(full, self.rank, self.size)
        lane = self._common.lane  # gathers of the user's thread are elsewhere, and reductions come when this is over
        return self._launch("publish", detail(full), lambda: collectives.all_gather(lane, full, source), None, full)

    def _all_to_all(self, receives: list[Tensor], sends: list[Tensor]) -> Handle:
        lane, what = self._common.lane, str(receives[self.rank].dtype)
        return self._launch(
            "all_to_all", what, lambda: collectives.all_to_all(lane, receives, sends), None, *receives, *sends
        )

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        return self._launch(
            "all_reduce",
            f"{op} of {detail(tensor)}",
            lambda: collectives.all_reduce(self._common.lane, tensor, op),
            None,
            tensor,
        )

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        return self._launch(
            "broadcast",
            f"{detail(tensor)} from rank {src}",
            lambda: collectives.broadcast(self._pg, tensor, src),
            None,
            tensor,
        )
