"""The contests of a run, from the outside: processes are started, and times become ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerokern.memory.room import room

from ..zero.launch import run_ranks
from ..zero.measure import MEMORY_SHARE, PROCESS_NBYTES, Advance, Row, Say, raced, side_by_side
from ..zero.turns import LARGE, Effort
from . import ours
from .job import OffloadJob

PROGRAM = f"{__package__}.rank"
USUAL = Effort(rounds=15, steps=4, trial_rounds=3)
OF_LARGE = Effort(rounds=11, steps=3, trial_rounds=2)


def usual_effort(numel: int) -> Effort:
    """Turns are longer than without offload: at the end of each, ours waits for work that has no compute beside it."""
    return OF_LARGE if numel >= LARGE else USUAL


@dataclass(frozen=True)
class Weight:
    """Host memory of one contender alone, all ranks together: between steps, and the most in a step."""

    held: int
    peak: int


@dataclass(frozen=True)
class Outcome:
    """The rows of a contest, who was missing and why, what each takes of host memory, and who ran side by side."""

    job: OffloadJob
    rows: list[Row]
    missing: dict[str, str]
    weights: dict[str, Weight]
    sets: list[list[str]]
    steps: int

    @property
    def name(self) -> str:
        return self.job.name


def measure(job: OffloadJob, effort: Effort, say: Say, advance: Advance) -> Outcome:
    """Tunes, weighs each contender alone, splits who does not fit at once, and lets each set take turns."""
    say(f"{job.name}:")

    def rounds(done: int, of: int) -> None:
        advance(job.name, done, of)

    missing: dict[str, str] = {}
    weights: dict[str, Weight] = {}
    sets: list[tuple[str, ...]] = [()]
    if effort.tune:
        tuned = run_ranks("tune", job, effort, say, rounds, PROGRAM)
        missing = tuned["missing"]
        here = tuple(peer for peer in job.peers if peer not in missing)
        job = dataclasses.replace(job, wirings=tuned["wirings"], peers=here)
        for name in job.wirings:
            alone = run_ranks("memory", dataclasses.replace(job, names=(name,)), effort, say, rounds, PROGRAM)
            if "missing" in alone:
                say(f"{name}: its memory is not known, {alone['missing']}")
                continue
            weights[name] = Weight(**alone)
            say(f"{name}: {per_parameter(weights[name].held, job):.1f} B of host memory per parameter")
        sets = split(list(job.wirings), weights, job, min(room().values()))
    done = raced(
        sets, lambda names: run_ranks("contest", dataclasses.replace(job, names=names), effort, say, rounds, PROGRAM)
    )
    return Outcome(job, done.rows(job, ours.NAMES), missing | done.missing, weights, done.sets, done.steps)


def per_parameter(nbytes: float, job: OffloadJob) -> float:
    """Of the model, whatever the number of ranks that share or repeat it."""
    return nbytes / job.numel


def split(
    names: Sequence[str], weights: Mapping[str, Weight], job: OffloadJob, free_nbytes: float
) -> list[tuple[str, ...]]:
    """Sets of contenders that fit into memory side by side; ours are in each of them."""
    always = [name for name in names if name in ours.NAMES]

    def fits(found: Iterable[str]) -> bool:
        known = [weights[name] for name in (*always, *found) if name in weights]
        at_work = max((one.peak - one.held for one in known), default=0)
        needed = sum(one.held for one in known) + at_work + job.ranks * PROCESS_NBYTES
        return needed <= MEMORY_SHARE * free_nbytes

    return side_by_side(names, always, fits)
