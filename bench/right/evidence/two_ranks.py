"""Two ranks over gloo, and DeepSpeed's shortest configuration, for the reproductions beside this file."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn


def enter(rank: int, file: str, act: Callable[..., None], args: tuple[Any, ...]) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    os.environ.update(where, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    act(rank, *args)


def on_two_ranks(act: Callable[..., None], *args: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(enter, (f"{folder}/ranks", act, args), 2)


def deepspeed_engine(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, **config: Any) -> Any:
    import deepspeed

    logging.disable(logging.CRITICAL)
    config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def show(rank: int, stage: int, what: str, model: nn.Module) -> None:
    """The first element of each parameter."""
    import deepspeed

    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params) if stage == 3 else torch.no_grad():
        if not rank:
            print(f"stage {stage}: {what}: {[round(param.flatten()[0].item(), 4) for param in params]}", flush=True)
