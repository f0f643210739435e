"""torchao's CPUOffloadOptimizer: a copy of each parameter in pinned memory, gradients fetched as backward makes them,
torch's fused AdamW per parameter on the CPU. It moves between a GPU and the host: it has no place among CPU ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from ..contest import Missing
from ..offload import device
from ..zero.trainer import Candidate, Seat

NAME = "torchao"


def required() -> Any:
    """CPUOffloadOptimizer, or Missing with what it lacks here."""
    if importlib.util.find_spec("torchao") is None:
        raise Missing("torchao is not installed (pip install torchao)")
    if not torch.cuda.is_available():
        raise Missing("torchao's CPUOffloadOptimizer needs a GPU")
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer


def on_device(stage: device.Stage) -> device.Trainer:
    """It steps copies in the parameters' own dtype: bf16 parameters have bf16 masters and states."""
    make = required()
    model = stage.model()
    params = list(model.parameters())
    optimizer = make(params, torch.optim.AdamW, fused=True, **device.HYPER)

    def update() -> None:
        nn.utils.clip_grad_norm_(params, device.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return device.Trainer(device.plain_loop(model, update))


def training(seat: Seat) -> list[Candidate]:
    required()
    raise Missing("torchao's CPUOffloadOptimizer neither shards nor trains on CPU ranks")


CANDIDATES = {"offload": training}
