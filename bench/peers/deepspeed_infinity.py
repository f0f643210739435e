"""DeepSpeed's ZeRO-Infinity on its CPU accelerator over gloo: stage 3, parameters and optimizer both on the CPU or both
on disk. Its native CPU Adam and torch's fused AdamW compete, and so do overlap and, on disk, sizes of requests. In bf16
it keeps fp32 masters.

Set so that parameters really leave: nothing stays for being small, and no more than two blocks stay gathered, since a
model that does not fit cannot keep more. DeepSpeed swaps no tensor below 1 MiB; that floor is lowered to the smallest
request, for a share of two ranks of a small model lies below it."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
from typing import Any

import torch

from ..contest import Missing
from ..zero.job import Batch
from ..zero.trainer import Candidate, Seat, Trainer, wirings
from .deepspeed_zero import FUSED, NATIVE, OVERLAPS, config_of, optimizer_of

BUCKET = 25_000_000
OPTIMIZERS = {kind: kind for kind in (NATIVE, FUSED)}
MIB = 1 << 20
BLOCKS = {"requests of 1 MiB": MIB, "requests of 256 KiB": MIB // 4}
LEAST_NBYTES = 4096  # that goes to the disk
BUFFERS, DEPTH = 8, 32
LIVE_BLOCKS = 2
_numbers = itertools.count()


def config(seat: Seat, device: str, overlap: bool, block: int) -> dict[str, Any]:
    job = seat.job
    made = config_of(seat, 3, BUCKET, overlap)
    largest = 4 * job.shape.width**2
    where: dict[str, Any] = {"device": device, "pin_memory": False}
    param, optimizer = dict(where), dict(where)
    if device == "nvme":
        # one that is built later empties the folder that it is given
        path = os.path.join(job.folder, f"deepspeed-{next(_numbers)}")
        param |= {"nvme_path": path, "buffer_count": BUFFERS, "buffer_size": largest + MIB, "max_in_cpu": 0}
        optimizer |= {"nvme_path": path, "buffer_count": 5, "pipeline_read": True, "pipeline_write": True}
    made["zero_optimization"] |= {
        "offload_param": param,
        "offload_optimizer": optimizer,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": LIVE_BLOCKS * 12 * job.shape.width**2,
        "stage3_max_reuse_distance": 0,
    }
    aio = {"block_size": block, "queue_depth": DEPTH, "thread_count": 1, "single_submit": False, "overlap_events": True}
    return {
        **made,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.micro,
        "aio": aio,
    }


def build(seat: Seat, device: str, kind: str, overlap: bool, block: int) -> Trainer:
    import deepspeed

    if device == "nvme":
        _lower_the_floor(block)
    model = seat.job.build_model()
    optimizer = optimizer_of(kind, list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(seat, device, overlap, block))
    micro = seat.job.micro

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = []
        batch: Batch
        for batch in zip(tokens.chunk(micro), targets.chunk(micro), strict=True):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Trainer(step, close=engine.destroy)


def _lower_the_floor(block: int) -> None:
    """It compares a tensor with the larger of this constant and the size of a request."""
    from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper

    for module in (optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = min(module.MIN_AIO_BYTES, LEAST_NBYTES, block)


def offered(device: str, seat: Seat) -> list[Candidate]:
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("deepspeed is not installed (pip install deepspeed)")
    if device == "nvme" and not seat.job.folder:
        raise Missing("it needs a folder on a disk (--path FOLDER)")
    if device == "nvme" and not seat.job.is_bf16:
        raise Missing("in fp32 its swapped parameters come back as bf16, and the first product refuses them")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    made = functools.partial(build, seat, device)
    blocks = BLOCKS if device == "nvme" else {"": MIB}
    return wirings(f"deepspeed-{device}", made, kind=OPTIMIZERS, overlap=OVERLAPS, block=blocks)


CANDIDATES = {
    "infinity-cpu": functools.partial(offered, "cpu"),
    "infinity-nvme": functools.partial(offered, "nvme"),
}
