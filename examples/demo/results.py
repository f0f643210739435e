"""What came out of the acts: what was found, in words and for good or ill, and whether something failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import larger, memory, race, together
from .act import Act
from .view import megabytes

SAME_LOSS = 0.01  # nats per byte
SAME_SHARE = 0.05  # of time or memory


def compared(ratio: float, less: str, more: str, same: str) -> str:
    """`ratio` is theirs to ours.

    >>> [compared(ratio, "less time", "more time", "the same time") for ratio in (2.1, 0.5, 1.01)]
    ['2.1x less time', '2.0x more time', 'the same time']
    """
    if abs(ratio - 1) < SAME_SHARE:
        return same
    return f"{ratio:.1f}x {less}" if ratio > 1 else f"{1 / ratio:.1f}x {more}"


def listed(outcomes: Sequence[memory.Outcome], all_of_them: Sequence[memory.Outcome]) -> list[str]:
    """Their names; that of a side where nobody else of it is left."""
    sides = []
    for is_torch, side in ((False, "zerokern"), (True, "torch")):
        members = [one for one in all_of_them if one.contender.is_torch is is_torch]
        chosen = [one for one in outcomes if one.contender.is_torch is is_torch]
        whole = len(chosen) == len(members) > 1
        sides += [side] if whole else [one.label.removesuffix(" AdamW") for one in chosen]
    return sides


def capped_finding(act: Act, outcomes: Sequence[memory.Outcome]) -> str:
    """Who trains under the cap, who runs out."""
    ways = {
        ("trains", "train"): [one for one in outcomes if one.trained],
        ("runs out of memory", "run out of memory"): [one for one in outcomes if one.out_of_memory],
        ("fails", "fail"): [one for one in outcomes if not (one.trained or one.out_of_memory)],
    }
    if all(one.trained for one in outcomes):
        least = min(outcomes, key=lambda one: sum(memory.needs(act, one.name)[0].values()))
        needed = sum(memory.needs(act, least.name)[0].values())
        return f"In {megabytes(act.cap)} all train; {least.label} needs least, {megabytes(needed)}"
    said = []
    for (one_does, more_do), group in ways.items():
        if group:
            names = listed(group, outcomes)
            said.append(f"{' and '.join(names)} {more_do if len(names) > 1 else one_does}")
    return f"In {megabytes(act.cap)} {', '.join(said)}"


def ours(lanes: Sequence[race.Lane]) -> list[race.Lane]:
    return [lane for lane in lanes if not lane.contender.is_torch]


def loss_finding(lanes: list[race.Lane]) -> str:
    """How far the losses of zerokern's lanes end from those of torch's."""
    gaps = [(race.loss_gap(lane, lanes), lane) for lane in ours(lanes)]
    gap, lane = max(gaps, key=lambda one: abs(one[0]) if math.isfinite(one[0]) else math.inf)
    if not math.isfinite(gap):
        return f"{lane.name} has no finite loss"
    if abs(gap) > SAME_LOSS:
        return f"Not the same loss: {lane.name} ends {abs(gap):.2f} {'higher' if gap > 0 else 'lower'}"
    return f"Same loss as torch, within {max(1, math.ceil(abs(gap) * 1e4)) / 1e4:.4f}"


def time_finding(lanes: list[race.Lane]) -> str:
    """How long the update of the first exact lane takes beside its peer's, those of bf16 models first."""
    exact = [lane for lane in ours(lanes) if not lane.contender.lossy] or ours(lanes)
    lane = min(exact, key=lambda one: one.contender.dtype.itemsize)
    ratio = race.ratio(race.peer(lane, lanes).optimizer_seconds, lane.optimizer_seconds)
    return compared(ratio, "less time", "more time", "the same time") + " in the optimizer"


def race_finding(lanes: list[race.Lane]) -> str:
    return f"{loss_finding(lanes)}, {time_finding(lanes)}"


def ranks_finding(outcome: together.Outcome) -> str:
    """How much less a rank holds than one process, and whether the losses are the same."""
    share = outcome.held_by_a_rank / outcome.plain.held
    amount = (
        "as much as one"
        if abs(share - 1) < 0.005
        else f"{100 * abs(1 - share):.0f} % {'less' if share < 1 else 'more'}"
    )
    same = "other losses" if outcome.failed else "same loss"
    return f"Each of {outcome.act.world} processes holds {amount}, {same}"


def rested_finding(outcome: larger.Outcome) -> str:
    times = sum(larger.needs(outcome.act).values()) / outcome.act.cap
    bits = f"other losses from step {outcome.differs} on" if outcome.differs else "same bits"
    return f"A training of {times:.1f}x its memory cap runs from disk, {bits}"


@dataclass
class Results:
    """Of the acts that ran so far."""

    capped: list[tuple[Act, list[memory.Outcome]]] = field(default_factory=list)
    lanes: list[race.Lane] = field(default_factory=list)
    ranks: together.Outcome | None = None
    rested: larger.Outcome | None = None

    @property
    def findings(self) -> list[str]:
        """A finding of each act that came to one."""
        return [
            *(capped_finding(act, outcomes) for act, outcomes in self.capped if outcomes),
            *([race_finding(self.lanes)] if self.lanes else []),
            *([ranks_finding(self.ranks)] if self.ranks and self.ranks.told else []),
            *([rested_finding(self.rested)] if self.rested and self.rested.told else []),
        ]

    @property
    def failures(self) -> list[str]:
        """Of runs that failed by themselves, and of a first cap that none of zerokern's fitted."""
        outcomes = [one for _, several in self.capped for one in several]
        first = [one for one in self.capped[0][1] if not one.contender.is_torch] if self.capped else []
        return [
            *(f"{one.label}: {one.failure or 'out of memory'}" for one in outcomes if one.failed),
            *(["nothing of zerokern's fitted the cap"] if first and not any(one.trained for one in first) else []),
            *([self.ranks.fault] if self.ranks and self.ranks.failed else []),
            *([self.rested.failure] if self.rested and self.rested.failed else []),
        ]
