"""The contests of a run, from the outside: processes are started, and times become ratios."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..offload.measure import Weight, contested
from ..zero.measure import Advance, Row, Say
from ..zero.turns import LARGE, Effort
from . import disk, ours
from .job import InfinityJob

PROGRAM = f"{__package__}.rank"
USUAL = Effort(rounds=11, steps=2, trial_rounds=2, check_steps=20)
OF_LARGE = Effort(rounds=7, steps=1, trial_rounds=2, trial_steps=1, check_steps=20)
ALWAYS = (*ours.NAMES, disk.NAME)


# whom each of ours is compared with, by where its parameters rest: who does the same
RIVALS = {
    ours.RESIDENT: (ours.RESIDENT, "deepspeed-cpu", "fsdp2"),
    ours.CPU: (ours.RESIDENT, ours.CPU, "deepspeed-cpu", "fsdp2"),
    ours.NVME: (ours.RESIDENT, ours.NVME, "deepspeed-nvme", disk.NAME),
}


def usual_effort(numel: int) -> Effort:
    return OF_LARGE if numel >= LARGE else USUAL


@dataclass(frozen=True)
class Outcome:
    """The rows of a contest, who was missing and why, what each takes of memory and moves to and from the disk, whose
    losses had the bits of ours resident, and who ran side by side."""

    job: InfinityJob
    rows: list[Row]
    missing: dict[str, str]
    weights: dict[str, Weight]
    notes: dict[str, str]
    sets: list[list[str]]
    steps: int

    @property
    def name(self) -> str:
        return self.job.name


def measure(job: InfinityJob, effort: Effort, say: Say, advance: Advance) -> Outcome:
    """Tunes, weighs each contender alone, splits who does not fit at once, and lets each set take turns."""
    say(f"{job.name}:")
    tuned, missing, weights, done = contested(
        job, effort, say, lambda at, of: advance(job.name, at, of), PROGRAM, ALWAYS
    )
    rows = [alike(one) for one in done.rows(tuned, ours.NAMES, beside=(ours.RESIDENT, *ours.OFFLOADED))]
    return Outcome(tuned, rows, missing | done.missing, weights, done.notes, done.sets, done.steps)


def alike(row: Row) -> Row:
    """The row with the ratios that mean something."""
    rivals = RIVALS.get(row.name.removesuffix(ours.VERTICAL), ())
    kept = {name: ratio for name, ratio in row.ratio.items() if name in rivals}
    return dataclasses.replace(row, ratio=kept, roof_share=None if row.name == disk.NAME else row.roof_share)
