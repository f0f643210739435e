"""The contests of a run, from the outside: processes are started, and times become ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zerokern.memory.room import memory_left

from ..contest import WrongResult
from ..timers import Estimate, median_estimate, paired_ratio
from . import ours, plain
from .job import Job
from .launch import run_ranks
from .turns import Effort

Say = Callable[[str], None]
Advance = Callable[[str, int, int], None]

PROCESS_NBYTES = 0.7 * 2**30
MEMORY_SHARE = 0.85
# bytes per parameter and rank that a contender holds between its turns, and those that only the one at work needs
RESTING = {
    "fp32": {plain.NAME: 13, "ddp": 17, "zero1": 14} | dict(zip(ours.NAMES, (14, 12, 10), strict=True)),
    "bf16": {plain.NAME: 19, "ddp": 21, "zero1": 14} | dict(zip(ours.NAMES, (11, 10, 9), strict=True)),
}
FSDP2_RESTING, DEEPSPEED_RESTING, WORKING = 8, 16, 8


@dataclass(frozen=True)
class Row:
    """One contender: times are per step of the slowest rank; `roof_share` is the compute-only step over its own."""

    name: str
    ns: Estimate
    tokens_per_s: float
    roof_share: float | None
    loss: float
    ratio: dict[str, Estimate]
    wiring: str
    is_peer: bool
    is_roof: bool = False


@dataclass(frozen=True)
class Outcome:
    """The rows of a contest, who was missing and why, and the share of its step that DDP communicates."""

    job: Job
    rows: list[Row]
    missing: dict[str, str]
    share: float | None
    sets: list[list[str]]
    steps: int

    @property
    def name(self) -> str:
        return self.job.name


@dataclass
class Turns:
    """Times by name of one set of contenders that took turns; index i of all lists belongs to round i."""

    times: dict[str, list[float]]
    losses: dict[str, float]


@dataclass
class Raced:
    """All sets of a contest, one after the other."""

    found: list[Turns] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    wirings: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0

    def rows(self, job: Job, mine: Sequence[str], beside: Collection[str] = ()) -> list[Row]:
        """`beside`: those of ours that the rest of ours are compared with as well."""
        names = ordered(self.wirings, mine)
        return [row(name, self.wirings[name], job, self.found, mine, beside) for name in names]

    @property
    def sets(self) -> list[list[str]]:
        return [list(one.times) for one in self.found]


def raced(sets: Sequence[tuple[str, ...]], run: Callable[[tuple[str, ...]], dict[str, Any]]) -> Raced:
    """`run` is one contest of the contenders that it is given; a result that is wrong ends everything."""
    done = Raced()
    for names in sets:
        result = run(names)
        if "wrong" in result:
            raise WrongResult(result["wrong"])
        done.found.append(Turns(result["times"], result["losses"]))
        done.missing |= result["missing"]
        done.wirings |= result["wirings"]
        done.notes |= result.get("notes", {})
        done.steps = result["steps"]
    return done


def measure(job: Job, effort: Effort, say: Say, advance: Advance) -> Outcome:
    """Tunes, splits who does not fit into memory at once, and lets each set take turns."""
    say(f"{job.name}:")

    def rounds(done: int, of: int) -> None:
        advance(job.name, done, of)

    share, missing = None, {}
    sets: list[tuple[str, ...]] = [()]
    if effort.tune:
        tuned = run_ranks("tune", job, effort, say, rounds)
        share, missing = tuned["share"], tuned["missing"]
        here = tuple(peer for peer in job.peers if peer not in missing)
        job = dataclasses.replace(job, batch=tuned["batch"], wirings=tuned["wirings"], peers=here)
        sets = split(list(job.wirings), job, min(memory_left().values()))
    done = raced(sets, lambda names: run_ranks("contest", dataclasses.replace(job, names=names), effort, say, rounds))
    return Outcome(job, done.rows(job, ours.NAMES), missing | done.missing, share, done.sets, done.steps)


def resting_nbytes(name: str, job: Job) -> float:
    otherwise = FSDP2_RESTING if name.startswith("fsdp2") else DEEPSPEED_RESTING
    each = RESTING[job.dtype].get(name, otherwise)
    return each * job.numel * job.ranks


def split(names: Sequence[str], job: Job, free_nbytes: float) -> list[tuple[str, ...]]:
    """Sets of contenders that fit into memory side by side; ours and the bare computation are in each of them."""
    always = [name for name in names if name in ours.NAMES or name == plain.NAME]
    left = MEMORY_SHARE * free_nbytes - job.ranks * (PROCESS_NBYTES + WORKING * job.numel)
    left -= sum(resting_nbytes(name, job) for name in always)
    return side_by_side(names, always, lambda peers: sum(resting_nbytes(one, job) for one in peers) <= left)


def side_by_side(
    names: Sequence[str], always: Sequence[str], fit: Callable[[Sequence[str]], bool]
) -> list[tuple[str, ...]]:
    """Sets of contenders, as few as fit one after the other; those of `always` are in each of them.

    >>> side_by_side(["a", "b", "c", "us"], ["us"], lambda peers: len(peers) <= 2)
    [('us', 'a', 'b'), ('us', 'c')]
    """
    sets: list[list[str]] = [[]]
    for name in names:
        if name in always:
            continue
        if sets[-1] and not fit([*sets[-1], name]):
            sets.append([])
        sets[-1].append(name)
    return [(*always, *peers) for peers in sets]


def ordered(names: Iterable[str], mine: Sequence[str]) -> list[str]:
    """Ours, the peers as they were asked for, the roof."""
    names = list(names)
    peers = [name for name in names if name not in mine and name != plain.NAME]
    return [name for name in (*mine, *peers, plain.NAME) if name in names]


def row(
    name: str, wiring: str, job: Job, found: Sequence[Turns], mine: Sequence[str], beside: Collection[str] = ()
) -> Row:
    """`mine`: who is ours, and is compared with the others and with those of `beside`."""
    there = [turns for turns in found if name in turns.times]
    ns = median_estimate(time for turns in there for time in turns.times[name])
    ratios = {other: ratio for turns in reversed(there) for other, ratio in _ratios(turns, name)}
    roof = ratios.pop(plain.NAME, None)
    is_ours = name in mine
    return Row(
        name=name,
        ns=ns,
        tokens_per_s=job.tokens / ns.median * 1e9,
        roof_share=None if roof is None else roof.median,
        loss=there[-1].losses[name],
        ratio={other: ratio for other, ratio in ratios.items() if is_ours and (other not in mine or other in beside)},
        wiring=wiring,
        is_peer=not is_ours,
        is_roof=name == plain.NAME,
    )


def _ratios(turns: Turns, name: str) -> list[tuple[str, Estimate]]:
    own = turns.times[name]
    return [(other, paired_ratio(times, own)) for other, times in turns.times.items() if other != name]
