"""FSDP2: fully_shard of every block and of the root, fused AdamW on the sharded fp32 parameters, clip_grad_norm_.

Three schedules compete: as it comes (on a CPU each gather is waited for where it is needed), and asynchronous gathers
with one or two blocks prefetched by hand. In bf16 its policy computes in bf16 and reduces in bf16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..zero.job import MAX_NORM
from ..zero.trainer import Candidate, Seat, Trainer, clip_and_step, fused_adamw, trainer, wirings

SCHEDULES = {"per block, gathers as they come": 0, "per block, prefetch 1": 1, "per block, prefetch 2": 2}
Adapt = Callable[[FSDPModule], None]


def sharded(seat: Seat, prefetch: int, adapt: Adapt) -> nn.Module:
    model, mesh = seat.job.divided_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if seat.job.is_bf16 else MixedPrecisionPolicy()
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    adapt(model)
    if prefetch:
        model._set_unshard_async_op(True)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
    return model


def clip_and_step_by_mesh(module: nn.Module) -> Callable[[], None]:
    """Beside tensor parallelism: torch's fused step and its norm take DTensors of one mesh at a time."""
    of_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for param in module.parameters():
        assert isinstance(param, DTensor)
        of_mesh.setdefault(param.device_mesh, []).append(param)
    optimizers = [fused_adamw(params) for params in of_mesh.values()]

    def update() -> None:
        norms = [
            nn.utils.get_total_norm([one.grad for one in params if one.grad is not None]) for params in of_mesh.values()
        ]
        norm = nn.utils.get_total_norm([one.full_tensor() if isinstance(one, DTensor) else one for one in norms])
        for params, optimizer in zip(of_mesh.values(), optimizers, strict=True):
            nn.utils.clip_grads_with_norm_(params, MAX_NORM, norm)
            optimizer.step()
            optimizer.zero_grad()

    return update


def training(seat: Seat, name: str = "fsdp2", adapt: Adapt = lambda module: None) -> list[Candidate]:
    def build(prefetch: int) -> Trainer:
        module = sharded(seat, prefetch, adapt)
        if seat.job.tp > 1:
            return trainer(module, clip_and_step_by_mesh(module))
        params = list(module.parameters())
        return trainer(module, clip_and_step(params, fused_adamw(params), fold=False))

    return wirings(name, build, prefetch=SCHEDULES)


CANDIDATES = {"zero": training}
