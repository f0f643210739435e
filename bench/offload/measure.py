"""The contests of a run, from the outside: processes are started, and times become ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zerokern.memory.room import memory_left

from ..zero.job import Job
from ..zero.launch import run_ranks
from ..zero.measure import MEMORY_SHARE, PROCESS_NBYTES, Advance, Raced, Row, Say, raced, side_by_side
from ..zero.turns import LARGE, Effort
from . import ours
from .job import OffloadJob

AnyJob = TypeVar("AnyJob", bound=Job)
PROGRAM = f"{__package__}.rank"
USUAL = Effort(rounds=15, steps=4, trial_rounds=3)
OF_LARGE = Effort(rounds=11, steps=3, trial_rounds=2)


def usual_effort(numel: int) -> Effort:
    """Turns are longer than without offload: at the end of each, ours waits for work that has no compute beside it."""
    return OF_LARGE if numel >= LARGE else USUAL


@dataclass(frozen=True)
class Weight:
    """What one contender alone takes, all ranks together: host memory between steps, the most in a step, and the bytes
    that a step reads from the disk and writes there."""

    held: int
    peak: int
    read: int = 0
    written: int = 0


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

    tuned, missing, weights, done = contested(job, effort, say, rounds, PROGRAM, ours.NAMES)
    return Outcome(tuned, done.rows(tuned, ours.NAMES), missing | done.missing, weights, done.sets, done.steps)


def contested(
    job: AnyJob, effort: Effort, say: Say, rounds: Callable[[int, int], None], program: str, mine: Sequence[str]
) -> tuple[AnyJob, dict[str, str], dict[str, Weight], Raced]:
    """The job with the best wirings, who is missing, what each weighs, and the turns of everyone beside `mine`."""
    missing: dict[str, str] = {}
    weights: dict[str, Weight] = {}
    sets: list[tuple[str, ...]] = [()]
    if effort.tune:
        tuned = run_ranks("tune", job, effort, say, rounds, program)
        missing = tuned["missing"]
        here = tuple(peer for peer in job.peers if peer not in missing)
        job = dataclasses.replace(job, wirings=tuned["wirings"], peers=here)
        for name in job.wirings:
            alone = run_ranks("memory", dataclasses.replace(job, names=(name,)), effort, say, rounds, program)
            if "missing" in alone:
                say(f"{name}: its memory is not known, {alone['missing']}")
                continue
            weights[name] = Weight(**alone)
            say(f"{name}: {per_parameter(weights[name].held, job):.1f} B of host memory per parameter")
        sets = split(list(job.wirings), weights, job, min(memory_left().values()), mine)
    done = raced(
        sets, lambda names: run_ranks("contest", dataclasses.replace(job, names=names), effort, say, rounds, program)
    )
    return job, missing, weights, done


def per_parameter(nbytes: float, job: Job) -> float:
    """Of the model, whatever the number of ranks that share or repeat it."""
    return nbytes / job.numel


def split(
    names: Sequence[str],
    weights: Mapping[str, Weight],
    job: Job,
    free_nbytes: float,
    mine: Sequence[str] = ours.NAMES,
) -> list[tuple[str, ...]]:
    """Sets of contenders that fit into memory side by side; ours are in each of them."""
    always = [name for name in names if name in mine]

    def fits(found: Iterable[str]) -> bool:
        known = [weights[name] for name in (*always, *found) if name in weights]
        at_work = max((one.peak - one.held for one in known), default=0)
        needed = sum(one.held for one in known) + at_work + job.ranks * PROCESS_NBYTES
        return needed <= MEMORY_SHARE * free_nbytes

    return side_by_side(names, always, fits)
