"""FSDP2 with CPUOffloadPolicy: fully_shard of every block and of the root, fused AdamW on sharded fp32 parameters in
host memory, clip_grad_norm_. Prefetch competes as without offload, and so does keeping what forward has gathered for
the backward pass, which is what stage 2 does. In bf16 its policy computes in bf16 and reduces in bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from ..offload import device
from ..zero.trainer import Candidate, Seat, Trainer, clip_and_step, fused_adamw, trainer, wirings
from .fsdp2 import SCHEDULES

NAME = "fsdp2"
RESHARD = {"gathered until backward": False, "gathered twice": True}


def offload(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, again: bool, pinned: bool) -> FSDPModule:
    """`model` computes in `dtype`; its shards rest in host memory in the dtype that they have."""
    how = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned),
        "reshard_after_forward": again,
    }
    for block in blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def on_device(stage: device.Stage) -> device.Trainer:
    """One rank on a GPU, or on what plays it: nothing is sharded, and what forward has brought stays until backward."""
    model = stage.model(torch.float32).cpu()
    offload(model, list(model.blocks), torch.bfloat16, again=False, pinned=stage.device.type == "cuda")
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **device.HYPER)

    def update() -> None:
        nn.utils.clip_grad_norm_(params, device.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return device.Trainer(device.plain_loop(model, update))


def training(seat: Seat) -> list[Candidate]:
    def build(reshard: bool, prefetch: int) -> Trainer:
        model = seat.job.build_model()
        blocks = list(model.blocks)
        offload(model, blocks, torch.bfloat16 if seat.job.is_bf16 else torch.float32, reshard, pinned=False)
        if prefetch:
            model._set_unshard_async_op(True)
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
        params = list(model.parameters())
        return trainer(model, clip_and_step(params, fused_adamw(params), fold=False))

    return wirings(NAME, build, reshard=RESHARD, prefetch=SCHEDULES)


CANDIDATES = {"offload": training}
