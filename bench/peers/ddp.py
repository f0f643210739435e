"""DistributedDataParallel with torch's fused AdamW: gradients are views of the buckets, and bucket sizes compete. In
bf16 two ways compete: a bf16 model beside fp32 masters, whose gradients are bf16 by themselves, and autocast with
torch's hook that sends gradients as bf16."""

from __future__ import annotations

import functools

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ..zero.trainer import AUTOCAST, CLIPS, MASTERS, Candidate, Seat, Trainer, in_fp32, wirings, with_masters

BUCKETS = {f"bucket_cap_mb={size}": size for size in (25, 5, 100)}


def packed_in_bf16(state, bucket):  # DDP reads the annotations, and wants classes
    """torch's hook under another name: by its own DDP refuses it on gloo, where it works."""
    return bf16_compress_hook(None, bucket)


def wrapped(module: nn.Module, bucket_mb: int, packed: bool = False) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    if packed:
        ddp.register_comm_hook(None, packed_in_bf16)
    return ddp


def training(seat: Seat) -> list[Candidate]:
    def build(way: str, fold: bool, bucket_mb: int) -> Trainer:
        if way == MASTERS:
            return with_masters(seat.job, functools.partial(wrapped, bucket_mb=bucket_mb), fold=fold)
        wrap = functools.partial(wrapped, bucket_mb=bucket_mb, packed=way == AUTOCAST)
        return in_fp32(seat.job, wrap, fold=fold, autocast=way == AUTOCAST)

    ways = {MASTERS: MASTERS, "autocast and bf16_compress_hook": AUTOCAST} if seat.job.is_bf16 else {"fp32": "fp32"}
    return wirings("ddp", build, way=ways, fold=CLIPS, bucket_mb=BUCKETS)


CANDIDATES = {"zero": training}
