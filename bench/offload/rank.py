"""One rank of a contest, a process of its own: `python -m bench.offload.rank tune|memory|contest JOB EFFORT FD`.

Rank 0 tells what it finds as lines of JSON on the file that it was given; what libraries print goes to the log.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..contest import Missing
from ..zero import plain
from ..zero.rank import TOLERANCE, TRAINED_TOLERANCE, serve
from ..zero.trainer import Candidate
from ..zero.tuning import by_name
from ..zero.turns import Effort, Floor, Player, compared
from . import memory, ours
from .contenders import groups, truths, tune
from .job import OffloadJob

Tell = Callable[[dict[str, Any]], None]


def contest(floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    """Everyone's losses are compared with those of one process, then all take turns."""
    job = floor.seat.job
    missing: dict[str, str] = {}
    truth = {name: _losses_of(floor, make, effort.check_steps) for name, make in truths(floor.seat).items()}
    players: list[Player] = []
    wirings: dict[str, str] = {}
    for group, make in groups(floor.seat).items():
        try:
            for name, rivals in by_name(floor.agreed(make)).items():
                if job.names and name not in job.names:
                    continue
                chosen = next((one for one in rivals if one.wiring == job.wirings.get(name)), rivals[0])
                player, wrong = _checked(floor, chosen, truth)
                if wrong and _is_ours(name):
                    return {"wrong": f"{job.name}, {name}: {wrong}"}
                if wrong:
                    floor.leave([player])
                    raise Missing(f"{name}: {wrong}")
                players.append(player)
                wirings[name] = chosen.wiring
        except Missing as reason:
            missing[group] = str(reason)
            floor.say(f"{group}: missing, {reason}")
    if not players:
        return {"wrong": f"{job.name}: nobody can take part"}
    times = floor.race(players, effort.rounds, effort.steps, lambda done: tell({"round": [done, effort.rounds]}))
    losses = {player.name: floor.last_loss(player) for player in players}
    if apart := trained_apart(losses):
        return {"wrong": f"{job.name}, after {players[0].steps} steps: {apart}"}
    return {"times": times, "losses": losses, "missing": missing, "wirings": wirings, "steps": players[0].steps}


def _is_ours(name: str) -> bool:
    return name in (*ours.NAMES, ours.RESIDENT)


def _losses_of(floor: Floor, make: Callable[[], Any], steps: int) -> list[float]:
    reference = floor.seated(Candidate("truth", {}, make))
    losses = floor.losses(reference, steps, whole=True)
    floor.leave([reference])
    return losses


def _checked(floor: Floor, chosen: Candidate, truth: Mapping[str, Sequence[float]]) -> tuple[Player, str]:
    """A contender that has taken its first steps, and what is wrong with their losses."""
    player = floor.seated(chosen)
    wanted = truth.get(player.name, truth[""])
    if player.name == plain.NAME:
        floor.turn(player, len(wanted))
        return player, ""
    wrong = compared(wanted, floor.losses(player, len(wanted)), TOLERANCE[floor.seat.job.dtype])
    if not wrong:
        floor.say(f"{player.name}: the losses are right")
    return player, wrong


def trained_apart(losses: dict[str, float]) -> str:
    """Ours at the end of the contest: the bits of a run without offload, and as near to the peers as these are to
    each other, who round elsewhere. Delayed is a step behind them.

    >>> trained_apart({"zk sync": 2.2, "zk delayed": 2.1, "deepspeed": 2.0, "fsdp2": 2.05})
    'zk sync has the loss 2.2000, the others 2.0250'
    >>> trained_apart({"zk sync": 2.01, "no offload": 2.0})
    'zk sync has the loss 2.0100, and without offload 2.0000; allowed: the same bits'
    """
    resident = losses.get(ours.RESIDENT)
    others = [loss for name, loss in losses.items() if name not in (plain.NAME, ours.RESIDENT, *ours.NAMES)]
    mean = sum(others) / len(others) if others else 0.0
    near = max(TRAINED_TOLERANCE * mean, max(others) - min(others)) if others else math.inf
    for name in (ours.SYNC, ours.OVERLAP):
        mine = losses.get(name)
        if mine is not None and resident not in (None, mine):
            return f"{name} has the loss {mine:.4f}, and without offload {resident:.4f}; allowed: the same bits"
        if mine is not None and not abs(mine - mean) <= near:
            return f"{name} has the loss {mine:.4f}, the others {mean:.4f}"
    return ""


def perform(task: str, floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    if task == "tune":
        return tune(floor, effort)
    return memory.weigh(floor) if task == "memory" else contest(floor, effort, tell)


if __name__ == "__main__":
    serve(*sys.argv[1:], job_of=OffloadJob.from_json, perform=perform)
