"""FSDP2 with CPUOffloadPolicy in steps of several micro-batches: as in `fsdp2_offload`, and what forward has gathered
is released until backward, since a model that does not fit cannot keep it. Gradients are reduced with each micro-batch,
or once, of what whole gradients have summed up on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..infinity.job import accumulating
from ..zero.trainer import Candidate, Seat, Trainer, clip_and_step, fused_adamw, wirings
from .fsdp2 import SCHEDULES
from .fsdp2_offload import NAME, offload

REDUCES = {"reduced with each micro-batch": True, "reduced once": False}


def training(seat: Seat) -> list[Candidate]:
    def build(prefetch: int, each: bool) -> Trainer:
        model = seat.job.build_model()
        blocks = list(model.blocks)
        offload(model, blocks, torch.bfloat16 if seat.job.is_bf16 else torch.float32, again=True, pinned=False)
        if prefetch:
            model._set_unshard_async_op(True)
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
        params = list(model.parameters())

        @contextlib.contextmanager
        def unreduced() -> Iterator[None]:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        update = clip_and_step(params, fused_adamw(params), fold=False)
        step = accumulating(model, seat.job.micro, update, contextlib.nullcontext if each else unreduced)
        return Trainer(step)

    reduces = REDUCES if seat.job.micro > 1 else {"": True}
    return wirings(NAME, build, prefetch=SCHEDULES, each=reduces)


CANDIDATES = {"infinity": training}
