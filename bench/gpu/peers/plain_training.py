"""Plain PyTorch on one device: the same step without zk.shard, with our optimizer and with torch's own; and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerokern as zk

from ...offload import device
from ...offload.device import HYPER, MAX_NORM, Stage, Trainer, plain_loop

OURS, AUTOCAST, NARROW = "zk.AdamW", "torch fused, fp32", "torch fused, bf16"
# by the stage whose policy it has: whether what forward has gathered stays until backward, or is gathered again
FSDP2 = {2: "fsdp2, gathered until backward", 3: "fsdp2, gathered twice"}
FUSED = "clip_grad_norm_ and torch.optim.AdamW(fused=True)"
WIRINGS = {
    OURS: "plain parameters",
    AUTOCAST: f"{FUSED}, under autocast",
    NARROW: FUSED,
    **{name: f"fully_shard of each block and the root, {name.partition(', ')[2]}, {FUSED}" for name in FSDP2.values()},
}
# that an optimizer of torch moves: gradients are read for the norm, read and written by the clip, read by the update
PER_ELEMENT = 7 + 3


def plain(stage: Stage) -> Trainer:
    """zk.AdamW on plain parameters: the work of ours without zk.shard."""
    model = stage.model()
    optimizer: Any = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(plain_loop(model, update))


def fused(stage: Stage, dtype: torch.dtype) -> Trainer:
    """torch's fused AdamW; parameters and states are in `dtype`, and fp32 ones compute under autocast."""
    model = stage.model(dtype)
    step = plain_loop(model, clipped(model))

    def autocast(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(stage.device.type, torch.bfloat16, enabled=dtype == torch.float32):
            return step(tokens, targets)

    return Trainer(autocast)


def fsdp2(stage: Stage, number: int) -> Trainer:
    """FSDP2 on the default group: fp32 shards that compute in bf16, and blocks that reshard where our stage does.

    What the root itself has stays until backward in both, which is FSDP2's default.
    """
    model = stage.model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=number == 3)
    fully_shard(model, mp_policy=policy)
    return Trainer(plain_loop(model, clipped(model)))


def clipped(model: nn.Module) -> device.Update:
    """What plain PyTorch does after backward."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True, **HYPER)

    def update() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update
