"""A GPT of 152M at stage 3 through NCCL on one rank, where the host is late: beside FSDP2 in both modes and plain
parameters, and where the host's time goes, by torch's profiler and by counted Python calls.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ...offload import device
from ...offload.device import Stage
from ..peers import plain_training
from ..report import Desk
from ..settings import Settings
from ..turns import Contest
from . import zero
from .zero import BYTES, Field, name_of, one_rank, sharded

STEPS, TOP = 5, 20
STAGE = 3


def warmers(settings: Settings) -> list[Callable[[], object]]:
    return zero.warmers(settings)


def run(desk: Desk) -> None:
    settings = desk.settings
    with one_rank(settings) as (group, backend):
        stage = Stage(settings.device, zero.TOY if settings.rehearse else zero.SHAPE, recompute=False)
        tokens = zero.TOY_TOKENS if settings.rehearse else zero.TOKENS
        field, ours = Field(stage, tokens, tokens), name_of(STAGE, backend)
        fsdp2 = {name: functools.partial(plain_training.fsdp2, number=n) for n, name in plain_training.FSDP2.items()}
        peers = {name: field.peer(name, build, 4 * plain_training.PER_ELEMENT) for name, build in fsdp2.items()}
        peers[plain_training.OURS] = field.peer(plain_training.OURS, plain_training.plain, BYTES)
        title = f"step of a bf16 GPT, {stage.shape.numel:,} parameters, {tokens:,} tokens, stage 3 beside FSDP2"
        contest = Contest(title, stage.shape.numel, {ours: field.ours(STAGE, backend, group)}, peers)
        outcome = desk.contest(contest, 2)
        desk.ratio_to_fastest("stage3.fsdp2", outcome, ours, [plain_training.FSDP2[STAGE]])
        builds: dict[str, Callable[[Stage], device.Trainer]] = {
            ours: functools.partial(sharded, number=STAGE, group=group),
            **fsdp2,
            plain_training.OURS: plain_training.plain,
        }
        for name, build in builds.items():
            trainer, batch = build(stage), stage.batch(tokens)
            found = {**profiled(trainer, batch, stage), "python_calls_a_step": python_calls(trainer, batch)}
            desk.fact(f"stage3: the host's time, {name}", "rehearsed" if settings.rehearse else found)
            del trainer


def profiled(trainer: device.Trainer, batch: Any, stage: Stage) -> dict[str, Any]:
    """Microseconds of a step that the host computes for itself, in all and by op, and launches."""
    on_gpu = stage.device.type == "cuda"
    for _ in range(2):
        trainer.step(*batch)
    stage.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as found:
        for _ in range(STEPS):
            trainer.step(*batch)
        stage.synchronize()
    rows = sorted(found.key_averages(), key=lambda one: -one.self_cpu_time_total)
    launches = sum(one.count for one in rows if "LaunchKernel" in one.key)
    return {
        "host_us_a_step": round(sum(one.self_cpu_time_total for one in rows) / STEPS),
        "launches_a_step": launches / STEPS,
        "ops": [[one.key, one.count / STEPS, round(one.self_cpu_time_total / STEPS, 1)] for one in rows[:TOP]],
    }


def python_calls(trainer: device.Trainer, batch: Any) -> dict[str, Any]:
    """How many Python functions a step calls in this thread, and in which files most of them."""
    counts: Counter[str] = Counter()

    def seen(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            counts["/".join(frame.f_code.co_filename.rsplit("/", 3)[1:])] += 1

    sys.setprofile(seen)
    try:
        trainer.step(*batch)
    finally:
        sys.setprofile(None)
    return {"calls": counts.total(), "files": counts.most_common(TOP)}
