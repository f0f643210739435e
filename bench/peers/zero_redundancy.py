"""ZeroRedundancyOptimizer over DistributedDataParallel, torch's own ZeRO stage 1: each rank updates whole parameters
and broadcasts them. Its overlap with DDP steps inside of backward, before a global norm can be known, so it cannot
clip; and torch warns that it may hang on gloo. The clip factor cannot go through grad_scale: the optimizer inside does
not see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..zero.job import HYPER
from ..zero.trainer import Candidate, Seat, Trainer, in_fp32, wirings
from .ddp import BUCKETS, wrapped


def sharded_adamw(params: Sequence[nn.Parameter], as_view: bool) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, parameters_as_bucket_view=as_view, fused=True, **HYPER)


def training(seat: Seat) -> list[Candidate]:
    job = seat.job

    def build(as_view: bool, bucket_mb: int) -> Trainer:
        wrap = functools.partial(wrapped, bucket_mb=bucket_mb, packed=job.is_bf16)
        make = functools.partial(sharded_adamw, as_view=as_view)
        return in_fp32(job, wrap, make, fold=False, autocast=job.is_bf16)

    prefix = "autocast and bf16_compress_hook, " if job.is_bf16 else ""
    views = {f"{prefix}parameters_as_bucket_view={as_view}": as_view for as_view in (True, False)}
    return wirings("zero1", build, as_view=views, bucket_mb=BUCKETS)


CANDIDATES = {"zero": training}
