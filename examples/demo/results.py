"""What came out of the acts: what was found, in words and for good or ill, and whether something failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import larger, memory, race, together
from .act import Act
from .view import megabytes

SAME_LOSS = 0.01  # nats per byte
WRONG_LOSS = 0.1  # of an exact format: rounding comes to a tenth of this
ORDER = ("Sizes", "Memory", "Loss", "Time", "Processes", "Disk")
SAME_SHARE = 0.05  # of time or memory


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
        ("is left out", "are left out"): [one for one in outcomes if one.no_room],
        ("fails", "fail"): [one for one in outcomes if one.failure],
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


def timed(lanes: Sequence[race.Lane]) -> race.Lane:
    """The exact lane whose time is told, one of a bf16 model first."""
    exact = [lane for lane in ours(lanes) if not lane.contender.lossy] or ours(lanes)
    return min(exact, key=lambda one: one.contender.dtype.itemsize)


def optimizer_ratio(lanes: list[race.Lane]) -> float:
    """torch's time for norm, clipping and update, to that of the lane whose time is told."""
    lane = timed(lanes)
    return race.ratio(race.peer(lane, lanes).optimizer_seconds, lane.optimizer_seconds)


def time_finding(lanes: list[race.Lane]) -> str:
    """How long the update takes beside torch's, where this machine shows a gain."""
    ratio = optimizer_ratio(lanes)
    if ratio < 1 + SAME_SHARE:
        return "Norm, clipping and update: this machine shows no gain with a model of this size"
    return f"Norm, clipping and update take {ratio:.1f}x less time than torch's ({timed(lanes).name})"


def ranks_finding(outcome: together.Outcome) -> str:
    """How much less a rank holds than one process, and whether the losses are the same."""
    share = outcome.held_by_a_rank / outcome.plain.held
    amount = "no less" if abs(share - 1) < 0.005 else f"{100 * abs(1 - share):.0f} % {'less' if share < 1 else 'more'}"
    same = "other losses" if outcome.failed else "same loss"
    return f"Each of {outcome.act.world} processes holds {amount} than one process, {same}"


def rested_finding(outcome: larger.Outcome) -> str:
    times = sum(larger.needs(outcome.act).values()) / outcome.act.cap
    bits = f"other losses from step {outcome.differs} on" if outcome.differs else "same bits"
    return f"A training of {times:.1f}x its memory cap runs from disk, {bits}"


def wrong_losses(lanes: list[race.Lane]) -> list[str]:
    """The lanes of zerokern whose losses are no numbers, or, of the exact ones, far from torch's."""
    said = []
    for lane in ours(lanes):
        gap = race.loss_gap(lane, lanes)
        theirs = race.peer(lane, lanes).loss
        if math.isfinite(theirs) and not (math.isfinite(gap) and (lane.contender.lossy or abs(gap) < WRONG_LOSS)):
            said.append(f"{lane.name} ends with loss {lane.loss:.4f}, torch with {theirs:.4f}")
    return said


@dataclass
class Results:
    """Of the acts that ran so far."""

    capped: list[tuple[Act, list[memory.Outcome]]] = field(default_factory=list)
    lanes: list[race.Lane] = field(default_factory=list)
    ranks: together.Outcome | None = None
    rested: larger.Outcome | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # acts that this machine has no room for, and why
    broken: list[str] = field(default_factory=list)  # errors of zerokern, or of the demo itself
    ended: str = ""

    @property
    def findings(self) -> list[tuple[str, str]]:
        """What each act came to, with a word that names it."""
        found = [("Memory", capped_finding(act, outcomes)) for act, outcomes in self.capped if outcomes]
        if self.lanes:
            found += [("Loss", loss_finding(self.lanes)), ("Time", time_finding(self.lanes))]
        if self.ranks and self.ranks.told:
            found.append(("Processes", ranks_finding(self.ranks)))
        elif self.ranks and self.ranks.peer_failure:
            found.append(("Processes", f"torch alone failed: {self.ranks.peer_failure}"))
        if self.rested and self.rested.told:
            found.append(("Disk", rested_finding(self.rested)))
        names = {"1": "Memory", "2": "Loss", "3": "Processes", "4": "Disk"}
        said = [(names.get(act, "Sizes"), f"Left out here: {why}") for act, why in self.left_out.items()]
        return sorted(found + said, key=lambda one: ORDER.index(one[0]))

    @property
    def failures(self) -> list[str]:
        """What zerokern did wrong; that a machine has no room, or that torch fails, is none."""
        outcomes = [one for _, several in self.capped for one in several]
        return [
            *self.broken,
            *(f"{one.label}: {one.failure}" for one in outcomes if one.failed),
            *wrong_losses(self.lanes),
            *([self.ranks.fault] if self.ranks and self.ranks.failed else []),
            *([self.rested.failure] if self.rested and self.rested.failed else []),
        ]
