"""What happens in the processes: ranks that agree on everything, and contenders that take turns.

A turn is a few whole steps. It begins when every rank is there and idle; its time is that of the slowest rank.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..contest import Missing
from ..timers import settle
from .job import Data
from .trainer import Candidate, Seat, Step, Trainer

WARM_STEPS = 1


@dataclass(frozen=True)
class Effort:
    """Rounds of a contest and steps of a turn; the same for trials of wirings; steps whose losses are compared."""

    rounds: int = 15
    steps: int = 3
    trial_rounds: int = 2
    trial_steps: int = 2
    check_steps: int = 6
    tune: bool = True


SMOKE = Effort(rounds=2, steps=1, check_steps=3, tune=False)
LARGE, OF_LARGE = 50_000_000, Effort(rounds=11, steps=2)


def usual_effort(numel: int) -> Effort:
    """Long steps need fewer of them to a turn."""
    return OF_LARGE if numel >= LARGE else Effort()


@dataclass
class Player:
    """A contender at work. Everyone sees the same batches: step i of one is step i of all."""

    name: str
    trainer: Trainer
    take: Step
    steps: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)


class Floor:
    """This rank among the others. What all must agree on goes around; nobody decides alone."""

    def __init__(self, seat: Seat, tell: Callable[[dict[str, Any]], None]) -> None:
        self.seat = seat
        self.data = Data(seat.job)
        self._tell = tell

    def say(self, text: str) -> None:
        self._tell({"say": text})

    def all(self, value: Any) -> list[Any]:
        """What every rank has to say, in order of rank."""
        said: list[Any] = [None] * self.seat.job.ranks
        dist.all_gather_object(said, value)
        return said

    def agreed(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; Missing on every rank where it failed on one."""
        made, why = None, ""
        try:
            made = make()
        except Missing as reason:
            why = str(reason)
        except Exception as error:  # a peer may fail to build in any way
            why = f"{type(error).__name__}: {error}"
        reasons = [f"{said.splitlines()[0]} (rank {rank})" for rank, said in enumerate(self.all(why)) if said]
        if reasons:
            raise Missing(reasons[0].removesuffix(f" (rank {0})"))
        return made

    def seated(self, candidate: Candidate) -> Player:
        trainer = self.agreed(candidate.build)
        return Player(candidate.name, trainer, trainer.step)

    def leave(self, players: Sequence[Player]) -> None:
        for player in players:
            player.trainer.close()
        players = ()
        gc.collect()

    def turn(self, player: Player, steps: int) -> float:
        """Nanoseconds per step, of the slowest rank."""
        batches = [self.data.of_rank(player.steps + i, self.seat.rank) for i in range(steps)]
        gc.collect()
        dist.barrier()
        settle()
        dist.barrier()
        started = time.perf_counter_ns()
        for batch in batches:
            loss = player.take(*batch)
        player.trainer.finish()
        ns = (time.perf_counter_ns() - started) / steps
        player.losses = [loss]
        player.steps += steps
        return max(self.all(ns))

    def losses(self, player: Player, steps: int, whole: bool = False) -> list[float]:
        """The means over ranks of its next losses; `whole` gives it the batches of all ranks."""
        own = []
        for _ in range(steps):
            step = player.steps
            batch = self.data.of_all(step) if whole else self.data.of_rank(step, self.seat.rank)
            own.append(float(player.take(*batch)))
            player.steps += 1
        return [statistics.fmean(each) for each in zip(*self.all(own), strict=True)]

    def last_loss(self, player: Player) -> float:
        return statistics.fmean(self.all(float(player.losses[-1])))

    def race(
        self, players: Sequence[Player], rounds: int, steps: int, after: Callable[[int], None] = lambda done: None
    ) -> dict[str, list[float]]:
        """Every player's turns; index i of all lists belongs to round i. The order changes from round to round."""
        times: dict[str, list[float]] = {player.name: [] for player in players}
        order = random.Random(0)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for done in range(1, rounds + 1):
                for player in order.sample(players, len(players)):
                    times[player.name].append(self.turn(player, steps))
                after(done)
        finally:
            gc.enable()
            gc.unfreeze()
        return times


def compared(wanted: Sequence[float], found: Sequence[float], tolerance: float) -> str:
    """What is wrong with the losses, or nothing.

    >>> compared([2.0, 1.5], [2.0, 1.6], 0.01)
    'its loss in step 2 is 1.600000 and should be 1.500000 within 1 %'
    """
    for step, (want, got) in enumerate(zip(wanted, found, strict=True), start=1):
        if not abs(got - want) <= tolerance * abs(want):
            return f"its loss in step {step} is {got:.6f} and should be {want:.6f} within {100 * tolerance:.2g} %"
    return ""


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    return min(times, key=lambda name: statistics.median(times[name]))
