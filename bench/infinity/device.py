"""One device, its host and its disk: a bf16 GPT whose parameters rest in one of them and whose state in one of them.

The parameters never lie on the device all at once, not even while the model is built.
"""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerokern as zk
from zerokern.examples.model import GPT

from ..offload import case, device
from .ours import STAGE

DEVICE, HOST, DISK = "device", "cpu", "nvme"
SCHEDULE = "overlap"
_numbers = itertools.count()


@dataclass(frozen=True)
class Resting(case.Case):
    """Where parameters and state rest, and the folder of what is on disk."""

    params: str = DEVICE
    states: str = DEVICE
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.shape.numel:,} parameters on {self.params}, state on {self.states}, {self.form}"


def tier(kind: str, folder: str) -> Any:
    """On disk each has a folder of its own."""
    return zk.Nvme(Path(folder) / f"infinity-{next(_numbers)}") if kind == DISK else kind


def trainer(stage: device.Stage, one: Resting) -> device.Trainer:
    model = built(stage, tier(one.params, one.folder))
    optimizer: Any = zk.AdamW(
        model.parameters(), tier=tier(one.states, one.folder), schedule="sync" if one.states == DEVICE else SCHEDULE,
        max_grad_norm=device.MAX_NORM, **device.FORMATS[one.form], **device.HYPER,
    )  # fmt: skip

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return device.Trainer(device.plain_loop(model, update), optimizer.flush)


def built(stage: device.Stage, tier: Any) -> nn.Module:
    """The values that `Stage.model` has, unit by unit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng(), torch.device(stage.device):
            torch.manual_seed(0)
            make = functools.partial(_model, stage)
            return zk.build(make, device=stage.device, stage=STAGE, tier=tier)
    finally:
        torch.set_default_dtype(before)


def _model(stage: device.Stage) -> GPT:
    return device.recomputing(GPT(stage.shape))


if __name__ == "__main__":
    case.main(*sys.argv[1:], case_of=Resting.from_json, trainer=trainer)
