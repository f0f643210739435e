"""One rank of a contest, a process of its own: `python -m bench.infinity.rank tune|memory|contest JOB EFFORT FD`.

Rank 0 tells what it finds as lines of JSON on the file that it was given; what libraries print goes to the log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..contest import Missing
from ..offload import memory
from ..offload.contenders import tune
from ..zero import plain
from ..zero.rank import TOLERANCE, TRAINED_TOLERANCE, serve
from ..zero.trainer import Candidate
from ..zero.tuning import by_name
from ..zero.turns import Effort, Floor, compared
from . import disk, ours
from .contenders import groups
from .job import InfinityJob

TRUE_STEPS = 6  # that are compared with fp32 training in one process; from there on roundings to bf16 have grown
SILENT = (plain.NAME, disk.NAME)  # who have no losses
SAME = "the same bits as {}"
Tell = Callable[[dict[str, Any]], None]


def contest(floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    """Everyone's losses are compared with those of one process, ours with ours resident too; then all take turns."""
    job = floor.seat.job
    missing: dict[str, str] = {}
    wirings: dict[str, str] = {}
    notes: dict[str, str] = {}
    reference = floor.seated(Candidate("truth", {}, lambda: plain.truth(floor.seat)))
    truth = floor.losses(reference, min(TRUE_STEPS, effort.check_steps), whole=True)
    floor.leave([reference])
    del reference
    resident: dict[str, list[float]] = {}
    players = []
    for group, make in groups(floor.seat).items():
        try:
            for name, rivals in by_name(floor.agreed(make)).items():
                if job.names and name not in job.names:
                    continue
                chosen = next((one for one in rivals if one.wiring == job.wirings.get(name)), rivals[0])
                player = floor.seated(chosen)
                if name in SILENT:
                    floor.turn(player, effort.check_steps)
                else:
                    losses = floor.losses(player, effort.check_steps)
                    wrong = untrue(name, losses, truth, resident, TOLERANCE[job.dtype])
                    if wrong and name in ours.NAMES:
                        return {"wrong": f"{job.name}, {name}: {wrong}"}
                    if wrong:
                        floor.leave([player])
                        raise Missing(f"{name}: {wrong}")
                    if name in ours.NAMES and ours.is_resident(name):
                        resident[name] = losses
                    elif name in ours.NAMES and ours.resident_of(name) in resident:
                        notes[name] = SAME.format(ours.resident_of(name))
                    floor.say(f"{name}: {', '.join(['the losses are right', *filter(None, [notes.get(name)])])}")
                players.append(player)
                wirings[name] = chosen.wiring
        except Missing as reason:
            missing[group] = str(reason)
            floor.say(f"{group}: missing, {reason}")
    if not players:
        return {"wrong": f"{job.name}: nobody can take part"}
    times = floor.race(players, effort.rounds, effort.steps, lambda done: tell({"round": [done, effort.rounds]}))
    last = {player.name: floor.last_loss(player) for player in players}
    if apart := trained_apart(last):
        return {"wrong": f"{job.name}, after {players[0].steps} steps: {apart}"}
    steps = players[0].steps
    return {"times": times, "losses": last, "missing": missing, "wirings": wirings, "notes": notes, "steps": steps}


def untrue(
    name: str,
    losses: Sequence[float],
    truth: Sequence[float],
    resident: Mapping[str, Sequence[float]],
    tolerance: float,
) -> str:
    """What is wrong with a contender's losses, or nothing: ours have the bits of ours resident in the same order; the
    two orders differ where the root sums.

    >>> untrue("zk cpu", [2.0, 1.5001], [2.0], {"zk resident": [2.0, 1.5]}, 0.01)
    'its loss in step 2 is 1.5001000000, and 1.5000000000 resident; allowed: the same bits'
    """
    wrong = compared(truth, losses[: len(truth)], tolerance)
    if wrong or name not in ours.NAMES:
        return wrong
    if ours.is_resident(name):
        return compared(resident[ours.RESIDENT], losses, tolerance) if ours.RESIDENT in resident else ""
    pairs = zip(resident.get(ours.resident_of(name), losses), losses, strict=True)
    for step, (want, found) in enumerate(pairs, start=1):
        if want != found:
            return f"its loss in step {step} is {found:.10f}, and {want:.10f} resident; allowed: the same bits"
    return ""


def trained_apart(losses: Mapping[str, float]) -> str:
    """Ours at the end of the contest: the bits of ours resident in the same order, and both orders nearly alike.

    >>> trained_apart({"zk resident": 2.0, "zk cpu": 2.01})
    'zk cpu has the loss 2.0100, and zk resident 2.0000; allowed: the same bits'
    """
    for name in ours.NAMES:
        other = ours.RESIDENT if ours.is_resident(name) else ours.resident_of(name)
        if name not in losses or other not in losses or losses[name] == losses[other]:
            continue
        if not ours.is_resident(name):
            return f"{name} has the loss {losses[name]:.4f}, and {other} {losses[other]:.4f}; allowed: the same bits"
        if not abs(losses[name] - losses[other]) <= TRAINED_TOLERANCE * losses[other]:
            return f"{name} has the loss {losses[name]:.4f}, and {other} {losses[other]:.4f}"
    return ""


def perform(task: str, floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    if task == "tune":
        return tune(floor, effort, groups)
    return memory.weigh(floor, groups) if task == "memory" else contest(floor, effort, tell)


if __name__ == "__main__":
    serve(*sys.argv[1:], job_of=InfinityJob.from_json, perform=perform)
