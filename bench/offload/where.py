"""Whether `update="host"` or `update="device"` is faster on this machine's GPU: whole steps of both, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerokern.core.errors import ZerokernError

from ..machine import birth
from ..report import SCHEMA, columns, duration
from ..timers import Contestant, Estimate, interleave, median_estimate, paired_ratio
from ..zero.job import MODELS
from .device import Stage, Trainer, ours
from .ours import OVERLAP, SYNC

UPDATES = ("host", "device")
NAMES = (SYNC, OVERLAP)
TOKENS = 4096
ROUNDS = {False: 15, True: 2}  # by whether it is a smoke run
NO_GPU = (
    "--where compares updates of parameters on a GPU, and there is none here; for a described machine: "
    "zerokern plan --numel 8B --tier cpu --update auto --hardware gh200"
)


@dataclass(frozen=True)
class Found:
    """Steps of one model with one schedule: nanoseconds by `update`, and the host's over the device's, pair by pair."""

    case: str
    ns: Mapping[str, Estimate]
    ratio: Estimate
    interrupted: str = ""

    @property
    def faster(self) -> str:
        """The better value of `update=`, or what says that the difference is not sure."""
        if self.ratio.low <= 1 <= self.ratio.high:
            return "either"
        return "device" if self.ratio.low > 1 else "host"


def trainers(stage: Stage, name: str) -> dict[str, Trainer]:
    """Two models, one for each value of `update=`."""
    return {update: ours(stage, name, "exact", update=update) for update in UPDATES}


def compared(case: str, steps: Mapping[str, Callable[[], object]], rounds: int) -> Found:
    """Takes turns between these steps, each of which ends when the device is done."""
    found = interleave([Contestant(update, step) for update, step in steps.items()], rounds)
    ratio = paired_ratio(found["host"], found["device"])
    return Found(case, {update: median_estimate(found[update]) for update in UPDATES}, ratio, found.interrupted)


def stage_here(model: str) -> Stage:
    """The GPU and a model for it; raises an error where there is no GPU."""
    if not torch.cuda.is_available():
        raise ZerokernError(NO_GPU)
    return Stage(torch.device("cuda", torch.cuda.current_device()), MODELS[model])


def measure(model: str, rounds: int, make: Callable[[Stage, str], dict[str, Trainer]] = trainers) -> list[Found]:
    """Compares both values of `update=`, inside step() and beside forwards."""
    stage = stage_here(model)
    batch, found = stage.batch(TOKENS), []
    for name in NAMES:

        def whole(trainer: Trainer) -> None:
            trainer.step(*batch)
            trainer.settle()
            stage.synchronize()

        steps = {update: lambda one=one: whole(one) for update, one in make(stage, name).items()}
        found.append(compared(f"GPT {model}, bf16, {name}", steps, rounds))
        if found[-1].interrupted:
            break
    return found


def lines(found: Sequence[Found]) -> list[str]:
    """One aligned line for each schedule."""
    rows = [
        [one.case, *(duration(one.ns[update].median) for update in UPDATES), f"{one.ratio.median:.2f}", one.faster]
        for one in found
    ]
    return columns(["", *(f'update="{update}"' for update in UPDATES), "host / device", "faster"], rows)


def document(found: Sequence[Found], command: str) -> dict[str, Any]:
    """The JSON of a run."""
    rows = [
        {
            "name": one.case,
            **{f"{update}_ns": one.ns[update].median for update in UPDATES},
            "ratio": [one.ratio.low, one.ratio.median, one.ratio.high],
            "faster": one.faster,
        }
        for one in found
    ]
    when = {"interrupted": found[-1].interrupted} if found and found[-1].interrupted else {}
    return {"schema": SCHEMA, **birth("offload", command), "rows": rows, **when}
