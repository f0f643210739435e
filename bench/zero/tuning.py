"""Before the contest: each peer's best wiring, and a batch at which DDP communicates as long as the contest asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..contest import Missing
from ..peers import candidates
from . import ours, plain
from .job import Data
from .trainer import Candidate, Seat
from .turns import WARM_STEPS, Effort, Floor, Player, fastest

SHARE = (0.25, 0.30)
FIRST_BATCH, MOST_TRIES = 6, 6


def groups(seat: Seat) -> dict[str, Callable[[], Sequence[Candidate]]]:
    """Who may take part: what makes the candidates of ours, of the bare computation, and of each peer."""
    named = {"zerokern": lambda: ours.candidates(seat)}
    if seat.job.tp == 1:  # no rank has a whole model otherwise
        named[plain.NAME] = lambda: plain.candidates(seat)
    return named | {peer: candidates(peer, "zero", seat) for peer in seat.job.peers}


def by_name(found: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    return {one.name: [other for other in found if other.name == one.name] for one in found}


def tune(floor: Floor, effort: Effort) -> dict[str, Any]:
    """The batch, the share that DDP communicates there, the best wirings by name, and who is missing and why."""
    chosen: dict[str, str] = {}
    missing: dict[str, str] = {}
    share = None
    if floor.seat.job.batch == 0:
        first = candidates("ddp", "zero", floor.seat)
        best = _best(floor_with(floor, FIRST_BATCH), floor.agreed(first), effort)
        batch, share = calibrated(floor, best, effort)
        floor = floor_with(floor, batch)
        floor.say(f"batch: {batch} sequences per rank, DDP communicates {share:.1%} of its step ({best.wiring})")
    for group, make in groups(floor.seat).items():
        try:
            for name, rivals in by_name(floor.agreed(make)).items():
                chosen[name] = _best(floor, rivals, effort).wiring
                if len(rivals) > 1:
                    floor.say(f"{name}: competes with {chosen[name]}")
        except Missing as reason:
            missing[group] = str(reason)
            floor.say(f"{group}: missing, {reason}")
    return {"batch": floor.seat.job.batch, "share": share, "wirings": chosen, "missing": missing}


def floor_with(floor: Floor, batch: int) -> Floor:
    return Floor(Seat(floor.seat.job.with_batch(batch), floor.seat.rank), floor._tell)


def _best(floor: Floor, rivals: Sequence[Candidate], effort: Effort) -> Candidate:
    """One axis after the other: its choices take turns, with what is the best so far on all the others."""
    best = rivals[0]
    for axis in best.choices:
        others = {key: choice for key, choice in best.choices.items() if key != axis}
        abreast = [one for one in rivals if all(one.choices[key] == choice for key, choice in others.items())]
        if len(abreast) > 1:
            best = _race(floor, abreast, effort)
    return best


def _race(floor: Floor, rivals: Sequence[Candidate], effort: Effort) -> Candidate:
    players, reason = [], Missing("it has no wiring")
    for one in rivals:
        try:
            players.append(dataclasses.replace(floor.seated(one), name=one.wiring))
        except Missing as failed:
            reason = failed
    if not players:
        raise reason
    for player in players:
        floor.turn(player, WARM_STEPS)
    times = floor.race(players, effort.trial_rounds, effort.trial_steps)
    floor.leave(players)
    won = fastest(times)
    return next(one for one in rivals if one.wiring == won)


def calibrated(floor: Floor, ddp: Candidate, effort: Effort) -> tuple[int, float]:
    """The batch at which DDP's step with communication is longer than its step without by the share that is asked.

    Without communication the replicas drift apart, so this model trains nothing else.
    """
    player = floor.seated(ddp)
    local = Player("local", player.trainer, player.trainer.local_step or player.take)
    tried: dict[int, float] = {}
    batch, aim = FIRST_BATCH, sum(SHARE) / 2
    while batch not in tried and len(tried) < MOST_TRIES:
        floor.data = Data(floor.seat.job.with_batch(batch))
        for one in (player, local):
            floor.turn(one, WARM_STEPS)
        times = floor.race([player, local], 2 * effort.trial_rounds, effort.trial_steps)
        both, alone = (sorted(times[name])[effort.trial_rounds] for name in (player.name, local.name))
        tried[batch] = max(0.0, 1 - alone / both)
        if SHARE[0] <= tried[batch] <= SHARE[1]:
            break
        wanted = (both - alone) * (1 - aim) / aim
        batch = max(1, round(batch * wanted / alone))
    floor.leave([player])
    best = min(tried, key=lambda one: abs(tried[one] - aim))
    return best, tried[best]
