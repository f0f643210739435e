"""One rank of a contest, a process of its own: `python -m bench.zero.rank tune|contest JOB EFFORT FD`.

Rank 0 tells what it finds as lines of JSON on the file that it was given; what libraries print goes to the log.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..contest import Missing
from . import ours, plain
from .job import Job
from .trainer import Candidate, Seat
from .tuning import by_name, groups, tune
from .turns import Effort, Floor, Player, compared

TIMEOUT = datetime.timedelta(minutes=15)  # DeepSpeed may compile while the others wait
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-3}
TRAINED_TOLERANCE = 0.02
Tell = Callable[[dict[str, Any]], None]


def contest(floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    """Everyone's losses are compared with those of one process, then all take turns."""
    job = floor.seat.job
    missing: dict[str, str] = {}
    reference = floor.seated(Candidate("truth", {}, lambda: plain.truth(floor.seat)))
    truth = floor.losses(reference, effort.check_steps, whole=True)
    floor.leave([reference])
    del reference
    players: list[Player] = []
    wirings: dict[str, str] = {}
    for group, make in groups(floor.seat).items():
        try:
            for name, rivals in by_name(floor.agreed(make)).items():
                if job.names and name not in job.names:
                    continue
                chosen = next((one for one in rivals if one.wiring == job.wirings.get(name)), rivals[0])
                player = floor.seated(chosen)
                alone = name == plain.NAME
                wrong = "" if alone else compared(truth, floor.losses(player, len(truth)), TOLERANCE[job.dtype])
                if alone:
                    floor.turn(player, len(truth))
                if wrong and name in ours.NAMES:
                    return {"wrong": f"{job.name}, {name}: {wrong}"}
                if wrong:
                    raise Missing(f"{name}: {wrong}")
                players.append(player)
                wirings[name] = chosen.wiring
                if not alone:
                    floor.say(f"{name}: the losses are right")
        except Missing as reason:
            missing[group] = str(reason)
            floor.say(f"{group}: missing, {reason}")
    if not players:
        return {"wrong": f"{job.name}: nobody can take part"}
    times = floor.race(players, effort.rounds, effort.steps, lambda done: tell({"round": [done, effort.rounds]}))
    losses = {player.name: floor.last_loss(player) for player in players}
    apart = trained_apart(losses)
    if apart:
        return {"wrong": f"{job.name}, after {players[0].steps} steps: {apart}"}
    return {"times": times, "losses": losses, "missing": missing, "wirings": wirings, "steps": players[0].steps}


def trained_apart(losses: dict[str, float]) -> str:
    """Ours at the end of the contest, against the mean of all that communicate.

    >>> trained_apart({"zk.shard stage 1": 2.2, "ddp": 2.0, "fsdp2": 2.0})
    'zk.shard stage 1 has the loss 2.2000, the others 2.0000'
    """
    others = [loss for name, loss in losses.items() if name != plain.NAME and name not in ours.NAMES]
    if not others:
        return ""
    mean = sum(others) / len(others)
    for name in ours.NAMES:
        if name in losses and not abs(losses[name] - mean) <= TRAINED_TOLERANCE * mean:
            return f"{name} has the loss {losses[name]:.4f}, the others {mean:.4f}"
    return ""


def perform(task: str, floor: Floor, effort: Effort, tell: Tell) -> dict[str, Any]:
    return tune(floor, effort) if task == "tune" else contest(floor, effort, tell)


def serve(
    task: str,
    job_text: str,
    effort_text: str,
    to_parent: str,
    *,
    job_of: Callable[[str], Job],
    perform: Callable[[str, Floor, Effort, Tell], dict[str, Any]],
) -> None:
    """What this process is there for; it ends here."""
    warnings.simplefilter("ignore")
    job, effort = job_of(job_text), Effort(**json.loads(effort_text))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with os.fdopen(int(to_parent), "w") as parent:

        def tell(message: dict[str, Any]) -> None:
            if rank == 0:
                print(json.dumps(message), file=parent, flush=True)

        tell({"result": perform(task, Floor(Seat(job, rank), tell), effort, tell)})
        dist.barrier()
    # without waiting for the threads of libraries, nor for their order at exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    serve(*sys.argv[1:], job_of=Job.from_json, perform=perform)
