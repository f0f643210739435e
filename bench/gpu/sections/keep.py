"""What `keep=` costs: units keep their inputs on the GPU, in host memory or on the disk, stage 3 through NCCL on one
rank; losses bit for bit against inputs that stay on the GPU, and the time of a step.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zerokern as zk
from zerokern.comm import Group

from ...contest import Provider
from ...offload.device import CHECKED_STEPS, HYPER, MAX_NORM, Stage, Trainer, plain_loop
from .. import host_rate
from ..report import Desk
from ..turns import Contest
from . import zero
from .zero import BYTES, Field, one_rank

STAGE = 3
DEVICE, HOST, DISK = "device", "cpu", "disk"


def run(desk: Desk) -> None:
    settings = desk.settings
    host_rate.tell(desk, "keep")
    with one_rank(desk.settings) as (group, _), tempfile.TemporaryDirectory(dir=desk.file.parent) as folder:
        stage = Stage(settings.device, zero.TOY if settings.rehearse else zero.SHAPE, recompute=False)
        tokens = zero.TOY_TOKENS if settings.rehearse else zero.TOKENS
        batch, losses = stage.batch(tokens), {}
        for where in (DEVICE, HOST, DISK):
            try:
                one = trainer(stage, where, group, Path(folder) / "compared" / where)
                losses[where] = [one.step(*batch).item() for _ in range(CHECKED_STEPS)]
            except Exception as error:
                desk.could_not(f"keep: {where}", error)
        for where in (HOST, DISK):
            if {DEVICE, where} <= losses.keys():
                apart = max(abs(a - b) for a, b in zip(losses[DEVICE], losses[where], strict=True))
                desk.figure(f"keep.{where}", apart, of=f"losses of {CHECKED_STEPS} steps")
        field = Field(stage, tokens, tokens)

        def maker(where: str) -> Callable[[], Sequence[Provider]]:
            build = functools.partial(trainer, where=where, group=group, folder=Path(folder) / "timed" / where)
            return lambda: field.provider(f"inputs on {where}", build, BYTES)

        title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, keep="
        ours = {f"inputs on {where}": maker(where) for where in (HOST, DISK)}
        desk.contest(Contest(title, stage.shape.numel, ours, {f"inputs on {DEVICE}": maker(DEVICE)}))


def trainer(stage: Stage, where: str, group: Group | None, folder: Path) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    keep: Any = zk.Nvme(folder) if where == DISK else where
    model = zk.shard(stage.model(), stage=STAGE, mesh=group, keep=keep)
    optimizer: Any = zk.AdamW(model.parameters(), max_grad_norm=MAX_NORM, **HYPER)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(plain_loop(model, update))
