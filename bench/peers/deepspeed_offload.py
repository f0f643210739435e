"""DeepSpeed's ZeRO-Offload on its CPU accelerator over gloo: the stage asked for, with `offload_optimizer` on the CPU.
Its native CPU Adam (compiled at first use, a minute, then cached) and torch's fused AdamW compete, and buckets and
overlap as without offload. Gradients go into fp32 copies, of which norm and update are made; masters are fp32."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch

from ..contest import Missing
from ..offload import device
from ..zero.job import Batch
from ..zero.trainer import Candidate, Seat, Trainer, wirings
from .deepspeed_zero import BUCKETS, FUSED, NATIVE, OVERLAPS, config_of, optimizer_of

NAME = "deepspeed"
OPTIMIZERS = {kind: kind for kind in (NATIVE, FUSED)}


def offloaded(config: dict[str, Any], pinned: bool = False) -> dict[str, Any]:
    """The same configuration with the optimizer on the host."""
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}
    return {**config, "zero_optimization": zero}


def build(seat: Seat, kind: str, overlap: bool, bucket: int) -> Trainer:
    import deepspeed

    model = seat.job.build_model()
    optimizer = optimizer_of(kind, list(model.parameters()))
    config = offloaded(config_of(seat, seat.job.stage, bucket, overlap))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Trainer(functools.partial(_step, engine), close=engine.destroy)


def _step(engine: Any, *batch: Batch) -> torch.Tensor:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def on_device(stage: device.Stage) -> device.Trainer:
    """One rank on a GPU, or on what plays it: stage 2, the native CPU Adam, gradients and masters in pinned memory."""
    _required()
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = stage.model()
    optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **device.HYPER)
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 500_000_000}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": device.MAX_NORM,
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": 1 << 30,
    }
    on_gpu = stage.device.type == "cuda"
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=offloaded(config, pinned=on_gpu))
    return device.Trainer(functools.partial(_step, engine))


def training(seat: Seat) -> list[Candidate]:
    _required()
    return wirings(NAME, functools.partial(build, seat), kind=OPTIMIZERS, overlap=OVERLAPS, bucket=BUCKETS)


def _required() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise Missing("deepspeed is not installed (pip install deepspeed)")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


CANDIDATES = {"offload": training}
