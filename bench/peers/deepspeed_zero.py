"""DeepSpeed's ZeRO stages 1, 2 and 3 on its CPU accelerator over gloo, in the process group that is there already.

Buckets, overlap and two optimizers compete: torch's fused AdamW and DeepSpeed's native CPU Adam (compiled at first use,
a minute, then cached). Stage 3 keeps its default of releasing nothing between forward and backward while fewer than 1e9
elements are live, which spares it the gathers of the backward pass. In bf16 it keeps fp32 masters."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from ..contest import Missing
from ..zero.job import HYPER, MAX_NORM, Batch
from ..zero.trainer import Candidate, Seat, Trainer, wirings

FUSED, NATIVE = "torch's fused AdamW", "DeepSpeedCPUAdam"
OPTIMIZERS = {kind: kind for kind in (FUSED, NATIVE)}
OVERLAPS = {f"overlap_comm={overlap}": overlap for overlap in (True, False)}
BUCKETS = {f"buckets of {bucket / 1e6:g}M elements": bucket for bucket in (25_000_000, 5_000_000)}
STAGES = (1, 2, 3)


def optimizer_of(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == FUSED:
        return torch.optim.AdamW(params, fused=True, **HYPER)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **HYPER)


def config_of(seat: Seat, stage: int, bucket: int, overlap: bool) -> dict[str, Any]:
    zero = {
        "stage": stage, "overlap_comm": overlap, "contiguous_gradients": True, "reduce_scatter": True,
        "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
    }  # fmt: skip
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 100_000}
    return {
        "train_micro_batch_size_per_gpu": seat.job.batch,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": seat.job.is_bf16},
        "steps_per_print": 1 << 30,
    }


def build(seat: Seat, stage: int, kind: str, overlap: bool, bucket: int) -> Trainer:
    import deepspeed

    model = seat.job.build_model()
    optimizer = optimizer_of(kind, list(model.parameters()))
    config = config_of(seat, stage, bucket, overlap)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(*batch: Batch) -> torch.Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step, close=engine.destroy)


def training(seat: Seat) -> list[Candidate]:
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("deepspeed is not installed (pip install deepspeed)")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    found = []
    for stage in STAGES:
        made = functools.partial(build, seat, stage)
        found += wirings(f"deepspeed-{stage}", made, kind=OPTIMIZERS, overlap=OVERLAPS, bucket=BUCKETS)
    return found


CANDIDATES = {"zero": training}
