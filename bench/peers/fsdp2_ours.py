"""FSDP2 with our collectives through its own hooks, so that a reader sees how much is gloo and how much is ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zerokern.comm import Group, Handle, group_on

from ..zero.trainer import Candidate, Seat
from .fsdp2 import training


class Waiting(dist.Work):
    """FSDP2 waits for nothing that is not a torch Work."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.handle.wait()
        return True


class Memory:
    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Memory, AllGather):
    """FSDP2 has copied the own shard into its place in the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        own = input_tensor.data_ptr() == output_tensor.chunk(self.group.size)[self.group.rank].data_ptr()
        handle = self.group.all_gather(output_tensor, None if own else input_tensor)
        if async_op:
            return Waiting(handle)
        handle.wait()
        return None


class Reduce(Memory, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        scale = 1.0 / self.group.size if op == dist.ReduceOp.AVG else 1.0
        handle = self.group.reduce_scatter(input_tensor, output_tensor, scale=scale)
        if async_op:
            return Waiting(handle)
        handle.wait()
        return None


def with_our_collectives(seat: Seat) -> list[Candidate]:
    group = group_on(None, torch.device("cpu"))

    def adapt(model: FSDPModule) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather(group))
                module.set_custom_reduce_scatter(Reduce(group))

    return training(seat, "fsdp2-ours", adapt)


CANDIDATES = {"zero": with_our_collectives}
