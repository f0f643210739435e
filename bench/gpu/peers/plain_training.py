"""Plain PyTorch on one device: the same step without zk.shard, with our optimizer and with torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import zerokern as zk

from ...contest import Provider
from ..training import HYPER, MAX_NORM, Step, Training, clipped

OURS, AUTOCAST, NARROW = "zk.AdamW", "torch fused, fp32", "torch fused, bf16"
FUSED = "clip_grad_norm_ and torch.optim.AdamW(fused=True)"


def peers(training: Training, bytes_of_ours: float) -> dict[str, Callable[[], Sequence[Provider]]]:
    """By name. zk.AdamW does the same work as ours; of torch's ways one keeps fp32 parameters, one is all bf16."""

    def ours() -> Step:
        model = training.model()
        optimizer = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return training.step(model, update)

    def fused(dtype: torch.dtype) -> Callable[[], Step]:
        def build() -> Step:
            model = training.model(dtype)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
            return training.step(model, clipped(model, optimizer), autocast=dtype == torch.float32)

        return build

    def torchs(name: str, dtype: torch.dtype, lossy: str = "") -> Callable[[], Sequence[Provider]]:
        # gradients are read for the norm, read and written by the clip, and read by the update
        moved = (7 + 3) * dtype.itemsize
        under = f"{FUSED}, under autocast" if dtype == torch.float32 else FUSED
        return lambda: [training.provider(name, fused(dtype), moved, wiring=under, lossy=lossy)]

    return {
        OURS: lambda: [training.provider(OURS, ours, bytes_of_ours, wiring="plain parameters")],
        AUTOCAST: torchs(AUTOCAST, torch.float32),
        NARROW: torchs(NARROW, torch.bfloat16, "bf16 parameters and states"),
    }
