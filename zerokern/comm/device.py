"""Ranks on devices: NCCL, one launch for each collective, in place where the request allows it.

Reductions run on a second communicator, so that their order relative to gathers may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokern.comm import collectives
from zerokern.comm.agreement import Waiting
from zerokern.comm.group import Group, own
from zerokern.comm.handle import Handle
from zerokern.comm.joining import Common
from zerokern.kernels import accumulate

__all__ = ["DeviceGroup"]


class DeviceGroup(Group):
    """A group over the library of a device."""

    def __init__(self, pg: Any, common: Common, device: torch.device, name: str) -> None:
        super().__init__(common.rank, common.size, device, name)
        if common.lane is None:
            common.lane = collectives.second_lane(pg)
        self._pg, self._common = pg, common

    def follow(self, key: str) -> None:
        self._common.board.follow(key)

    def agree(self, key: str) -> None:
        self._common.watch.agree(key)

    def _launch(
        self, kind: str, detail: str, launch: Callable[[], Any], finish: Callable[[], None] | None, *memory: Tensor
    ) -> Handle:
        watch = self._common.watch
        waiting = Waiting(kind, self._common.next(kind), detail)
        watch.refuse_after_failure(waiting)
        try:
            work = launch()
        except RuntimeError as error:
            raise watch.explain(waiting, error) from error
        watch.launched(waiting)

        def complete() -> None:
            with watch.over(waiting):
                work.wait()
            if finish is not None:
                finish()
            held.clear()

        held = list(memory)  # until the current stream has been told to wait for what reads and writes it
        return Handle(complete, work.is_completed if finish is None else None)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, scale: float, add: bool, scratch: Tensor | None) -> Handle:
        straight = not add and out.dtype == bucket.dtype
        if bucket.dtype == torch.float16 and abs(scale) < 1 and bucket.numel():
            # the library sums in fp16, whose largest number a sum of scaled losses reaches long before their mean does
            accumulate(bucket, [bucket], add=False, scale=scale)
            scale = 1.0
        if straight:
            total = out
        elif scratch is not None and scratch.numel() >= out.numel():
            total = scratch[: out.numel()]
        else:
            total = own(bucket, self.rank, self.size)

        def finish() -> None:
            if out.numel() and not (straight and scale == 1.0):
                accumulate(out, [total], add=add, scale=scale)

        return self._launch(
            "reduce_scatter",
            _detail(bucket),
            lambda: collectives.reduce_scatter(self._common.lane, total, bucket),
            None if straight and scale == 1.0 else finish,
            bucket,
            out,
            total,
        )

    def _all_gather(self, full: Tensor, shard: Tensor | None) -> Handle:
        source = own(full, self.rank, self.size) if shard is None else shard
        return self._launch(
            "all_gather", _detail(full), lambda: collectives.all_gather(self._pg, full, source), None, full, source
        )

    def _publish(self, full: Tensor) -> Handle:
        source = own(full, self.rank, self.size)
        lane = self._common.lane  # gathers of the user's thread are elsewhere, and reductions come when this is over
        return self._launch("publish", _detail(full), lambda: collectives.all_gather(lane, full, source), None, full)

    def _all_reduce(self, tensor: Tensor, op: str, scratch: Tensor | None) -> Handle:
        return self._launch(
            "all_reduce",
            f"{op} of {_detail(tensor)}",
            lambda: collectives.all_reduce(self._common.lane, tensor, op),
            None,
            tensor,
        )

    def _broadcast(self, tensor: Tensor, src: int) -> Handle:
        return self._launch(
            "broadcast",
            f"{_detail(tensor)} from rank {src}",
            lambda: collectives.broadcast(self._pg, tensor, src),
            None,
            tensor,
        )


def _detail(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"
